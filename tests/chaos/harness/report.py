"""The report of a run: what was done, what was found, and whether it is as promised; as text and as JSON."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from tests.chaos.harness.faults import Injected
from tests.chaos.harness.page import page
from tests.chaos.harness.schedule import EXACT, KINDS, Options
from tests.chaos.harness.stage import Stage
from tests.chaos.harness.tail import Arrivals
from tests.chaos.harness.verifier import Findings
from tests.chaos.harness.writers import Journal


@dataclass
class Report:
    options: Options
    findings: Findings
    problems: list[str]
    injected: list[Injected]
    summary: dict[str, Any]
    series: dict[str, list[tuple[int, int]]]
    times: dict[str, float] = field(default_factory=dict)

    @property
    def broken(self) -> list[str]:
        """Promises that were not kept; empty is what we want."""
        count = self.findings.count
        broken = [f"{count(what):,} {what.replace('_', ' ')}" for what in _NEVER if count(what)]
        if self.options.mode in EXACT and count("duplicates"):
            broken.append(f"{count('duplicates'):,} duplicates, and mode {self.options.mode} promises none")
        return broken + self.problems

    @property
    def passed(self) -> bool:
        return not self.broken

    def text(self) -> str:
        options, summary = self.options, self.summary
        verdict = "PASSED" if self.passed else "FAILED"
        source = f"PostgreSQL {options.postgres} {options.plugin} {options.source}"
        storm, settle = self.times.get("storm", 0.0), self.times.get("settle", 0.0)
        lines = [
            f"{verdict}  seed {options.seed}  {options.broker} {options.mode}  {source}",
            f"repeat with: {options.command()}",
            "",
            f"  faults         {summary['faults']:>10,}   ({summary['missed']:,} more had nothing to hit)",
            f"  events         {summary['committed']:>10,}   in {summary['transactions']:,} transactions",
        ]
        names = ("rolled_back", "unanswered", "stored", *_NEVER, "duplicates", "late_repeats")
        lines += [f"  {name.replace('_', ' '):14} {summary[name]:>10,}" for name in names]
        stall = summary["longest_stall_seconds"]
        lines += [
            f"  longest stall  {stall:>10.1f} s",
            f"  relay starts   {summary['relay_starts']:>10,}   {len(summary['relay_ends'])} ended by themselves",
            f"  duration       {storm:>10.1f} s, then {settle:.1f} s to settle",
            "",
            f"  {'fault':22}{'done':>6}{'missed':>8}   time to recover: {'median':>7}{'p95':>8}{'worst':>8}",
        ]
        for kind, row in summary["by_kind"].items():
            times = "".join(f"{row[name]:>7.2f}s" if row[name] is not None else "       -" for name in _TIMES)
            lines.append(f"  {kind:22}{row['done']:>6}{row['missed']:>8}{'':20}{times}")
        lines += ["", *(f"  BROKEN: {text}" for text in self.broken)]
        for end in summary["relay_ends"][:10]:
            said = end["said"].splitlines()
            lines.append(f"  {end['relay']} ended by itself with {end['code']}: {said[-1] if said else ''}")
        return "\n".join(lines).rstrip() + "\n"

    def as_json(self) -> bytes:
        began = self.times.get("began", 0.0)
        value = {
            "passed": self.passed,
            "broken": self.broken,
            "command": self.options.command(),
            "options": {**dataclasses.asdict(self.options), "report": None},
            "summary": self.summary,
            "storm_seconds": self.times.get("storm"),
            "settle_seconds": self.times.get("settle"),
            "findings": {name: getattr(self.findings, name) for name in _LISTS},
            "faults": [
                {
                    "number": each.number,
                    "kind": each.kind,
                    "began": round(each.began - began, 3),
                    "ended": round(each.ended - began, 3),
                    "effect": each.effect,
                    "seconds_to_recover": each.seconds_to_recover,
                }
                for each in self.injected
            ],
            "series": self.series,
        }
        return orjson.dumps(value, option=orjson.OPT_INDENT_2)

    def write(self, folder: Path) -> None:
        (folder / "report.txt").write_text(self.text())
        (folder / "report.json").write_bytes(self.as_json())
        (folder / "report.html").write_text(
            page(self.text(), self.injected, self.series, self.times, passed=self.passed)
        )


_NEVER = ("lost", "phantom", "reordered", "wrong_bodies")
_LISTS = ("lost", "phantom", "duplicates", "reordered", "wrong_bodies")
_TIMES = ("median", "p95", "worst")


def make_report(
    options: Options,
    findings: Findings,
    injected: list[Injected],
    journal: Journal,
    arrivals: Arrivals,
    stage: Stage,
    problems: list[str],
    began: float,
) -> Report:
    ends = [end for relay in stage.relays for end in relay.ends]
    problems = problems + [
        f"{end.relay} gave up with exit code {end.code}: {end.said.strip().splitlines()[-1:]}"
        for end in ends
        if end.code != 1  # 1: a restart may cure it, and it was restarted
    ]
    problems += [
        f"{relay.name} showed {count} tracebacks: see {relay.name}.err"
        for relay in stage.relays
        if (count := relay.tracebacks())
    ]
    done = [each for each in injected if not each.effect.startswith("missed")]
    summary: dict[str, Any] = {
        "faults": len(done),
        "missed": len(injected) - len(done),
        "committed": findings.committed,
        "transactions": journal.transactions,
        "rolled_back": len(journal.rolled_back),
        "unanswered": len(journal.unanswered),
        "stored": findings.stored,
        **{what: findings.count(what) for what in (*_NEVER, "duplicates", "late_repeats")},
        "longest_stall_seconds": round(longest_stall(journal.times, arrivals.times), 2),
        "relay_starts": sum(relay.started for relay in stage.relays),
        "relay_ends": [{"relay": end.relay, "code": end.code, "said": end.said} for end in ends],
        "by_kind": {kind: _row([each for each in injected if each.kind == kind]) for kind in KINDS},
    }
    summary["by_kind"] = {kind: row for kind, row in summary["by_kind"].items() if row["done"] + row["missed"]}
    series = {
        name: sorted((second - int(began), many) for second, many in of.per_second.items())
        for name, of in (("committed", journal), ("arrived", arrivals))
    }
    return Report(options, findings, problems, injected, summary, series, {"began": began})


def _row(faults: list[Injected]) -> dict[str, Any]:
    done = [each for each in faults if not each.effect.startswith("missed")]
    times = sorted(each.seconds_to_recover for each in done if each.seconds_to_recover is not None)
    return {
        "done": len(done),
        "missed": len(faults) - len(done),
        "median": statistics.median(times) if times else None,
        "p95": times[min(int(len(times) * 0.95), len(times) - 1)] if times else None,
        "worst": times[-1] if times else None,
    }


def longest_stall(commits: list[float], arrivals: list[float]) -> float:
    """The longest time in which nothing new arrived although something had been committed since the last arrival."""
    longest = 0.0
    for before, after in itertools.pairwise(arrivals):
        if after - before > longest:
            at = bisect.bisect_right(commits, before)
            if at < len(commits):
                longest = max(longest, after - commits[at])
    return longest
