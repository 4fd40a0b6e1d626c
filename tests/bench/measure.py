"""Measurements that `relay bench` does not make; each prints one table. Run them on a quiet machine.

    python -m tests.bench.measure notify     writers' transactions per second, with and without a trigger that notifies
    python -m tests.bench.measure recovery   a gap closed from the table, against the same rows streamed; memory
    python -m tests.bench.measure overhead   checkpoint, history and audit, on against off
    python -m tests.bench.measure polling    from commit to broker, while polling
    python -m tests.bench.measure synced     a nats-server that syncs every write, with and without atomic batches

Private servers, durable as in life; variants take turns, so that a slow minute hits all. `--help` has the sizes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nats
import psutil
import psycopg
from rich.console import Console
from rich.table import Table

from relay.embedded import NatsServer, PostgresServer
from tests.relays import RelayProcess, eventually
from tests.scene import Scene

_PATIENCE = 3600.0
_TRANSACTION = 1000  # rows
_INSERT = (
    "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
    " SELECT 'order', 'k' || i %% 1000, 'made', %s, jsonb_build_object('i', i, 'pad', repeat('x', 200))"
    " FROM generate_series(1, %s) i"
)
# As in life, not as in tests: half-second checkpoints would be measured otherwise.
_USUAL: dict[str, Any] = {"checkpoint": {"interval": "1s"}, "admin": {"listen": "127.0.0.1:0"}}


class Run(NamedTuple):
    rate: float  # events per second
    peak: int  # bytes of memory
    cpu: float  # microseconds of the relay per event


async def stage(postgres: PostgresServer, broker: NatsServer, folder: Path, **sections: Any) -> Scene:
    """A database and a stream of their own."""
    name = f"m{random.randrange(10**9)}"
    (folder / name).mkdir()
    merged = {key: {**_USUAL.get(key, {}), **sections.get(key, {})} for key in {*_USUAL, *sections}}
    return await Scene(postgres.create_database(name), broker.url, name, folder / name, **merged).set_up()


def fill(scene: Scene, rows: int) -> None:
    with psycopg.connect(scene.dsn) as connection:
        for start in range(0, rows, _TRANSACTION):
            connection.execute(_INSERT, (f"{scene.name}.orders", min(_TRANSACTION, rows - start)))
            connection.commit()


async def drain(scene: Scene, rows: int) -> Run:
    """Start the relay on a backlog; its rate between the first event and the last."""
    with RelayProcess(scene.path) as relay:
        process, peak, first = psutil.Process(relay.pid), 0, (0.0, 0, 0.0)

        def done() -> bool:
            nonlocal peak, first
            peak = max(peak, relay.resident_bytes)
            count = relay.counter("published_events")
            if count and not first[1]:
                first = (time.monotonic(), count, cpu(process))
            return count >= rows

        await eventually(done, "all is published", timeout=_PATIENCE, context=lambda: relay.output)
        seconds, events = time.monotonic() - first[0], max(1, rows - first[1])
        spent = cpu(process) - first[2]
        await relay.says("stream.started")
        await relay.stopped(60)
    return Run(events / max(seconds, 1e-9), peak, 1e6 * spent / events)


async def backlog(scene: Scene, rows: int) -> Run:
    """Rows that were written while the relay was away, streamed."""
    with RelayProcess(scene.path) as relay:
        await relay.streaming()
        await relay.stopped()
    await asyncio.to_thread(fill, scene, rows)
    run = await drain(scene, rows)
    scene.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    return run


def cpu(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def spread(values: Sequence[float], digits: int = 0) -> str:
    return f"{statistics.median(values):,.{digits}f} ({min(values):,.{digits}f} … {max(values):,.{digits}f})"


# --- what is measured


async def notify(asked: argparse.Namespace, postgres: PostgresServer, broker: NatsServer, folder: Path) -> None:
    """pgbench inserts a row per transaction; the relay polls, and listens where the trigger is."""
    script = folder / "insert.sql"
    made: dict[str, list[float]] = {"no trigger": [], "trigger": []}
    for _ in range(asked.repeat):
        for variant, rates in made.items():
            poll = {"notify": "outbox"} if variant == "trigger" else {}
            scene = await stage(postgres, broker, folder, source={"mode": "poll"}, poll=poll)
            if poll:
                scene.execute(
                    "CREATE FUNCTION wake() RETURNS trigger LANGUAGE plpgsql AS"
                    " 'BEGIN NOTIFY outbox; RETURN NULL; END';"
                    "CREATE TRIGGER wake AFTER INSERT ON outbox_events FOR EACH STATEMENT EXECUTE FUNCTION wake()"
                )
            script.write_text(
                "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
                f" VALUES ('order', 'k', 'made', '{scene.name}.orders', '{{}}');\n"
            )
            command = [str(postgres.bindir / "pgbench"), "-n", "-f", str(script), "-T", str(asked.seconds)]
            command += ["-c", str(asked.writers), "-j", "2", "-d", scene.dsn]
            with RelayProcess(scene.path) as relay:
                await relay.says("poll.started")
                done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
                await relay.stopped(60)
            found = re.search(r"tps = ([\d.]+)", done.stdout)
            assert found, done.stdout
            rates.append(float(found[1]))
    plain = statistics.median(made["no trigger"])
    rows = [[name, spread(rates), f"{statistics.median(rates) / plain:.0%}"] for name, rates in made.items()]
    show(f"NOTIFY: {asked.writers} writers, a row per transaction", ("", "transactions/s", "of plain"), rows)


async def recovery(asked: argparse.Namespace, postgres: PostgresServer, broker: NatsServer, folder: Path) -> None:
    """The same rows twice: streamed from the slot, and published from the table after the slot was dropped."""
    made: dict[str, list[Run]] = {"streaming": [], "recovery": []}
    for _ in range(asked.repeat):
        for variant, runs in made.items():
            scene = await stage(postgres, broker, folder)
            with RelayProcess(scene.path) as relay:
                await relay.streaming()
                await relay.stopped()
            await asyncio.to_thread(fill, scene, asked.rows)
            if variant == "recovery":
                scene.drop_slot()
            runs.append(await drain(scene, asked.rows))
            scene.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")
    plain = statistics.median(run.rate for run in made["streaming"])
    rows = [
        [
            name,
            spread([run.rate for run in runs]),
            f"{statistics.median(run.rate for run in runs) / plain:.0%}",
            spread([run.peak / 2**20 for run in runs]),
        ]
        for name, runs in made.items()
    ]
    show(f"{asked.rows:,} unpublished rows", ("", "events/s", "of streaming", "memory, MB"), rows)


async def overhead(asked: argparse.Namespace, postgres: PostgresServer, broker: NatsServer, folder: Path) -> None:
    """A backlog streamed with the defaults, and with checkpoint, history and audit as good as off."""
    variants: dict[str, dict[str, Any]] = {
        "on": {"checkpoint": {"history_interval": f"{asked.history}s"}},
        "off": {
            "checkpoint": {"interval": "1000s", "audit": False, "history_interval": "1d"},
            "source": {"wal_sender_timeout": "3600s"},
        },
    }
    made: dict[str, list[Run]] = {name: [] for name in variants}
    for _ in range(asked.repeat):
        for name, sections in variants.items():
            scene = await stage(postgres, broker, folder, **sections)
            made[name].append(await backlog(scene, asked.rows))
    plain = statistics.median(run.rate for run in made["off"])
    rows = [
        [
            name,
            spread([run.rate for run in runs]),
            f"{statistics.median(run.rate for run in runs) / plain - 1:+.1%}",
            spread([run.cpu for run in runs], 1),
        ]
        for name, runs in made.items()
    ]
    show(
        f"checkpoint every second, history every {asked.history} s, audit: {asked.rows:,} rows streamed",
        ("", "events/s", "against off", "CPU of the relay, µs/event"),
        rows,
    )


async def polling(asked: argparse.Namespace, postgres: PostgresServer, broker: NatsServer, folder: Path) -> None:
    """One event at a time, at random moments; a subscriber beside the stream takes the time."""
    rows = []
    for interval in asked.intervals:
        poll = {"interval": f"{interval}s", "min_interval": f"{interval}s", "max_interval": f"{interval}s"}
        poll["strategy"] = asked.strategy
        scene = await stage(postgres, broker, folder, source={"mode": "poll"}, poll=poll)
        arrived: dict[str, float] = {}

        async def take(message: Any, arrived: dict[str, float] = arrived) -> None:
            now = time.monotonic()
            arrived.setdefault((message.headers or {})["id"], now)

        client = await nats.connect(broker.url)
        await client.subscribe(f"{scene.name}.>", cb=take)
        committed: dict[str, float] = {}
        with RelayProcess(scene.path) as relay:
            await relay.says("poll.started")
            await relay.says("sink.opened")
            async with await psycopg.AsyncConnection.connect(scene.dsn, autocommit=True) as connection:
                for _ in range(asked.events):
                    await asyncio.sleep(random.random() * 2 * interval)
                    cursor = await connection.execute(
                        "INSERT INTO outbox_events (aggregate_id, event_type, topic, payload)"
                        " VALUES ('k', 'made', %s, '{}') RETURNING id::text",
                        (f"{scene.name}.orders",),
                    )
                    row = await cursor.fetchone()
                    assert row is not None
                    committed[row[0]] = time.monotonic()
            await eventually(lambda a=arrived, c=committed: len(a) >= len(c), "all came")  # type: ignore[misc]
            await relay.stopped()
        await client.close()
        lags = sorted(1000 * (arrived[each] - at) for each, at in committed.items())
        bound = 1000 * interval / 2 + 20
        p95 = lags[int(0.95 * (len(lags) - 1))]
        rows.append([f"{interval:g} s", f"{statistics.median(lags):,.0f}", f"{p95:,.0f}", f"{bound:,.0f}"])
    title = f"polling ({asked.strategy}), {asked.events} single events: from commit to broker, ms"
    show(title, ("interval", "p50", "p95", "half the interval + 20"), rows)


async def synced(asked: argparse.Namespace, postgres: PostgresServer, broker: NatsServer, folder: Path) -> None:
    """A backlog into a server that syncs as it does by default (two minutes), and into one that always syncs."""
    made: dict[str, list[Run]] = {"default": [], "always": [], "always, atomic batches": []}
    with NatsServer(storage="sync_interval: always") as careful:
        for _ in range(asked.repeat):
            for name, runs in made.items():
                scene = await stage(postgres, careful if name.startswith("always") else broker, folder)
                scene.sections["sink"]["jetstream"]["atomic"] = name.endswith("atomic batches")
                scene.configure()
                runs.append(await backlog(scene, asked.rows))
    rows = [
        [name, spread([run.rate for run in runs]), spread([run.cpu for run in runs], 1)] for name, runs in made.items()
    ]
    show(f"{asked.rows:,} rows streamed", ("sync_interval", "events/s", "CPU of the relay, µs/event"), rows)


WHAT = {each.__name__: each for each in (notify, recovery, overhead, polling, synced)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.measure")
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--repeat", type=int, default=3, help="rounds, interleaved")
    parser.add_argument("--rows", type=int, help="recovery: 1,000,000; overhead: 300,000")
    parser.add_argument("--seconds", type=int, default=20, help="notify: of each run")
    parser.add_argument("--writers", type=int, default=8, help="notify")
    parser.add_argument("--history", type=int, default=60, help="overhead: seconds between two rows of history")
    parser.add_argument("--events", type=int, default=100, help="polling: of each interval")
    parser.add_argument("--intervals", type=float, nargs="+", default=[0.2, 1.0], help="polling: seconds")
    parser.add_argument("--strategy", choices=("snapshot", "claim"), default="snapshot", help="polling")
    asked = parser.parse_args()
    asked.rows = asked.rows or (1_000_000 if asked.what == "recovery" else 300_000)
    settings = {"max_wal_size": "8GB", "synchronous_commit": "on"}
    with (
        PostgresServer("18", settings=settings) as postgres,
        NatsServer() as broker,
        tempfile.TemporaryDirectory() as folder,
    ):
        asyncio.run(WHAT[asked.what](asked, postgres, broker, Path(folder)))


if __name__ == "__main__":
    main()
