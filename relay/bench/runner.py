"""One run: servers up, rounds interleaved (every scenario once, then every scenario again), servers down."""

from __future__ import annotations

import contextlib
import os
import platform
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg

from relay import __version__
from relay.bench.arena import Arena, Say, open_arena
from relay.bench.plan import KEYS, PAYLOAD_BYTES, Plan
from relay.bench.process import BenchError
from relay.bench.result import LIMIT, Measurement, Report, summarise
from relay.bench.scenarios import MEASURES
from relay.config import mask_dsn, mask_url

FORMAT = 1  # of the JSON


async def run(plan: Plan, say: Say) -> Report:
    """Measure everything that the plan names."""
    started = time.monotonic()

    def progress(text: str) -> None:
        say(f"[{time.monotonic() - started:6.1f} s] {text}")

    measurements: list[Measurement] = []
    total = plan.repeat * len(plan.scenarios)
    with tempfile.TemporaryDirectory(prefix="relay-bench-") as folder:
        async with _translated(), open_arena(plan, progress) as arena:
            environment = _environment(arena)
            for repetition in range(plan.repeat):
                for number, scenario in enumerate(plan.scenarios):
                    label = f"{repetition * len(plan.scenarios) + number + 1}/{total} {scenario.name}, {plan.sink}"
                    progress(f"{label}: preparing")
                    async with arena.round() as place:
                        found = await MEASURES[scenario.kind](
                            place,
                            plan,
                            scenario,
                            repetition,
                            Path(folder),
                            lambda text, label=label: progress(f"{label}: {text}"),  # type: ignore[misc]
                        )
                    measurements += against_limit(found)
    return Report(FORMAT, environment, _shown(plan), summarise(measurements), measurements)


@contextlib.asynccontextmanager
async def _translated() -> AsyncIterator[None]:
    try:
        yield
    except psycopg.Error as exc:
        raise BenchError(
            f"PostgreSQL: {exc}", hint="the role of --dsn needs CREATEDB, REPLICATION and CHECKPOINT rights"
        ) from exc


def against_limit(measurements: Sequence[Measurement]) -> list[Measurement]:
    """Ratios within one round: what the machine did at that time touches both sides."""
    limits = [each.events_per_second for each in measurements if each.tool == LIMIT]
    limit = limits[0] if limits else None
    if not limit:
        return list(measurements)
    return [
        replace(each, ratio_to_limit=round(each.events_per_second / limit, 3)) if each.events_per_second else each
        for each in measurements
    ]


def _environment(arena: Arena) -> dict[str, Any]:
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "relay": __version__,
        "python": platform.python_version(),
        "postgres": arena.postgres_version,
        "broker": arena.broker.version,
        "embedded_postgres": arena.postgres_pid is not None,
        "embedded_broker": arena.broker.pid is not None,
        "machine": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": os.cpu_count(),
        "load_average_at_start": os.getloadavg(),  # others at work spoil every figure
        "payload_bytes": PAYLOAD_BYTES,
        "keys": KEYS,
    }


def _shown(plan: Plan) -> Plan:
    return replace(
        plan, dsn=mask_dsn(plan.dsn) if plan.dsn else None, broker=mask_url(plan.broker) if plan.broker else None
    )
