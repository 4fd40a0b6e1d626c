"""One run: servers up, rounds interleaved (every scenario once, then every scenario again), servers down."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg

from relay import __version__
from relay.bench.arena import Arena, open_arena
from relay.bench.calm import calmest
from relay.bench.contest import Maker, compared, contenders, groups
from relay.bench.modes import Kind
from relay.bench.plan import PAYLOAD_BYTES, Plan
from relay.bench.process import BenchError
from relay.bench.result import FORMAT, Measurement, Report, summarise
from relay.bench.scenarios import measure
from relay.bench.task import Task
from relay.config import mask_dsn, mask_url
from relay.errors import RelayError

Tell = Callable[[float, str], None]  # how much is done, from 0 to 1, and what happens now


async def run(plan: Plan, tell: Tell, peers: Mapping[str, Maker] | None = None, command: Sequence[str] = ()) -> Report:
    """Measure everything that the plan names."""
    measurements: list[Measurement] = []
    set_aside: list[Measurement] = []
    tools: dict[str, Mapping[str, Any]] = {}
    left_open: dict[str, str] = {}
    versions: list[str] = []
    environment: dict[str, Any] = {}
    steps = _Steps(plan, tell, peers or {})
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        for kind in plan.kinds:
            async with _translated(), open_arena(plan, kind, steps.say) as arena:
                environment = environment or _environment(plan, arena, command)
                versions.append(arena.broker.version)
                for repetition in range(plan.repeat):
                    for scenario in plan.scenarios:
                        task = Task(plan, scenario, repetition, Path(folder), steps.say, tools)
                        found: list[Measurement] = []
                        for group in groups(contenders(plan, scenario, kind, peers or {}), scenario, repetition):
                            steps.next(f"{scenario.name}, {', '.join(each.label for each in group)}")
                            try:
                                rounds = await calmest(partial(measure, arena, task, group), plan.calm, steps.say)
                                found += rounds.kept
                                set_aside += rounds.aside
                            except RelayError as exc:
                                if not group[0].peer:
                                    raise
                                left_open[f"{scenario.name}, {group[0].label}"] = _reason(exc)
                                steps.say(f"left open: {_reason(exc)}")
                        measurements += compared(plan, found)
    environment["broker"] = ", ".join(versions)
    return Report(FORMAT, environment, _shown(plan), summarise(measurements), measurements, tools, left_open, set_aside)


def _reason(exc: RelayError) -> str:
    return f"{exc} ({exc.hint})" if exc.hint else str(exc)


class _Steps:
    """How much of the run is done, counted in rounds."""

    def __init__(self, plan: Plan, tell: Tell, peers: Mapping[str, Maker]) -> None:
        self._tell = tell
        self._done = -1
        self._label = ""
        self._total = plan.repeat * sum(self._rounds(plan, kind, peers) for kind in plan.kinds)

    @staticmethod
    def _rounds(plan: Plan, kind: Kind, peers: Mapping[str, Maker]) -> int:
        return sum(len(groups(contenders(plan, each, kind, peers), each, 0)) for each in plan.scenarios)

    def next(self, label: str) -> None:
        self._done += 1
        self._label = f"{self._done + 1}/{self._total} {label.split(',', maxsplit=1)[0]}: "
        self.say(label.split(", ", 1)[1])

    def say(self, text: str) -> None:
        self._tell(max(self._done, 0) / max(self._total, 1), self._label + text)


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except psycopg.Error as exc:
        raise BenchError(
            f"PostgreSQL: {exc}", hint="the role of --dsn needs CREATEDB, REPLICATION and CHECKPOINT rights"
        ) from exc


def _environment(plan: Plan, arena: Arena, command: Sequence[str]) -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(command),
        "relay": __version__,
        "python": platform.python_version(),
        "postgres": arena.postgres_version,
        "embedded_postgres": arena.postgres_pid is not None,
        "embedded_broker": arena.broker.pid is not None,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "load_average_at_start": list(os.getloadavg()),  # others at work spoil every figure
        "payload_bytes": PAYLOAD_BYTES,
        "keys": plan.keys,
    }


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


def _shown(plan: Plan) -> Plan:
    return replace(
        plan, dsn=mask_dsn(plan.dsn) if plan.dsn else None, broker=mask_url(plan.broker) if plan.broker else None
    )


def lines(write: Callable[[str], None]) -> Tell:
    """Progress as lines with the time that has passed."""
    started = time.monotonic()
    return lambda _done, text: write(f"[{time.monotonic() - started:6.1f} s] {text}")
