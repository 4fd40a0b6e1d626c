"""What `relay bench` does with its options (`cli_bench.py` has them): plan, run with a progress bar, write files."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from relay.bench import peers as seam
from relay.bench.compare import Comparison, compare, render_comparison
from relay.bench.export import to_csv
from relay.bench.html import to_html
from relay.bench.picture import picture
from relay.bench.plan import Plan, make_plan
from relay.bench.render import render
from relay.bench.result import Report, read_report
from relay.bench.runner import lines, run
from relay.config import mask_dsn, mask_url
from relay.errors import ConfigError

__all__ = ["asked", "compared_files", "measured", "plot", "render", "render_comparison", "write"]


def asked(scenarios: Sequence[str], *, peers: Sequence[str], **options: Any) -> Plan:
    return make_plan(scenarios, peers=peers, known_peers=list(seam.known()) if peers else (), **options)


async def measured(plan: Plan) -> Report:
    makers = seam.known() if plan.peers else {}
    console = Console(stderr=True)
    if not console.is_terminal:
        return await run(plan, lines(lambda text: print(text, file=sys.stderr, flush=True)), makers, _command(plan))
    columns = (BarColumn(20), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as bar:
        shown = bar.add_task("", total=1.0)
        return await run(
            plan, lambda done, text: bar.update(shown, completed=done, description=text), makers, _command(plan)
        )


def _command(plan: Plan) -> list[str]:
    """How to repeat it; what may hold a password is masked."""
    secrets = {plan.dsn: mask_dsn, plan.broker: mask_url}
    words = ["relay"]
    for word in sys.argv[1:]:
        for secret, mask in secrets.items():
            if secret and word.endswith(secret):
                word = word.removesuffix(secret) + mask(secret)  # noqa: PLW2901
        words.append(word)
    return words


def write(report: Report, *, save: Path | None, csv: Path | None, html: Path | None) -> None:
    if save is not None:
        save.write_bytes(orjson.dumps(report, option=orjson.OPT_INDENT_2))
    if csv is not None:
        csv.write_text(to_csv(report))
    if html is not None:
        html.write_text(to_html(report))


def compared_files(before: Path, after: Path) -> list[Comparison]:
    return compare(read_report(before), read_report(after))


def plot(result: Path, *, svg: Path | None, html: Path | None, csv: Path | None, scenario: str) -> None:
    if svg is None and html is None and csv is None:
        raise ConfigError(["nothing to write: say --svg, --html or --csv"])
    report = read_report(result)
    if svg is not None:
        svg.write_text(picture(report, scenario))
    write(report, save=None, csv=csv, html=html)
