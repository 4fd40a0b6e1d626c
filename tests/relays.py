"""The whole relay as users run it: a process of its own on real servers, and an independent check of what it did.

`RelayProcess` is `relay run --config FILE` (started by `tests/zygote.py`), its log lines parsed. `Ledger` writes events
in transactions and keeps its own journal of what was committed; afterwards it compares that with what the broker holds.
Neither looks into the relay's memory, and `eventually` is the only way to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sized
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import psutil
import psycopg
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from relay.config import Config, load
from relay.embedded.process import freeze
from relay.setup import setup
from tests.sinks import Stored
from tests.zygote import Forked, zygote

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_PATIENCE = 90.0  # machines differ; whatever takes longer hangs


async def eventually(
    condition: Callable[[], Any],
    what: str = "",
    *,
    timeout: float = _PATIENCE,
    context: Callable[[], str] | None = None,
) -> Any:
    """Ask until the answer is true, and return it; fails with `what` and `context` when the time is over."""
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout:g} s: {what}\n{context() if context else ''}")
        await asyncio.sleep(0.02)
    return answer


async def more_than(listed: Sized, count: int, what: str, *, context: Callable[[], str] | None = None) -> None:
    """Wait until the list has more than so many."""
    await eventually(lambda: len(listed) > count, f"more than {count}: {what}", context=context)


# --- configuration


def toml(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(name)} = {toml(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)


def settings(dsn: str, sink: dict[str, Any], **sections: dict[str, Any]) -> dict[str, Any]:
    """Sections of a relay.toml that reacts fast: for tests, not for life."""
    defaults: dict[str, dict[str, Any]] = {
        "database": {"dsn": dsn, "connect_timeout": "10s"},
        "sink": sink,
        "admin": {"listen": "127.0.0.1:0"},
        "checkpoint": {"interval": "200ms"},
        "delivery": {"backoff_initial": "100ms", "backoff_max": "500ms", "shutdown_timeout": "5s"},
    }
    for name, values in sections.items():
        defaults[name] = {**defaults.get(name, {}), **values} if isinstance(values, dict) else values
    return defaults


def jetstream(url: str, stream: str, **more: Any) -> dict[str, Any]:
    """A sink section: one stream, made by the relay, on the subjects `stream`.>"""
    streams = [{"name": stream, "subjects": [f"{stream}.>"], "create": True}]
    return {"kind": "jetstream", "jetstream": {"servers": [url], "ack_timeout": "5s", "streams": streams, **more}}


def kafka(bootstrap: str, **more: Any) -> dict[str, Any]:
    options = {"bootstrap.servers": bootstrap}
    return {"kind": "kafka", "kafka": {"options": options, "connect_timeout": "10s", **more}}


def create_topic(bootstrap: str, topic: str, partitions: int = 4) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=1)])[topic].result(60)


def write_config(folder: Path, sections: dict[str, Any]) -> Path:
    path = folder / "relay.toml"
    path.write_text("".join(f"{name} = {toml(values)}\n" for name, values in sections.items()))
    return path


async def prepare(folder: Path, sections: dict[str, Any]) -> Path:
    """Write the configuration and set the database up."""
    path = write_config(folder, sections)
    await setup(load(path, {}))
    return path


def config_of(sections: dict[str, Any]) -> Config:
    return Config.model_validate(sections)


# --- the process


class RelayProcess:
    """`relay run` in a process of its own; ended, if need be killed, at the end of the `with` block."""

    def __init__(self, config: Path, *arguments: str) -> None:
        self._arguments = ["run", "--config", str(config), *arguments]
        self.lines: list[dict[str, Any]] = []
        self.stdout: list[str] = []
        self.stderr: list[str] = []
        self._process: Forked | None = None
        self._readers: list[threading.Thread] = []

    def start(self) -> Self:
        self._process = zygote().start(*self._arguments)
        for stream, keep in ((self._process.stdout, self._log_line), (self._process.stderr, self.stderr.append)):
            reader = threading.Thread(target=_drain, args=(stream, keep), daemon=True)
            reader.start()
            self._readers.append(reader)
        return self

    def _log_line(self, line: str) -> None:
        self.stdout.append(line)
        with contextlib.suppress(json.JSONDecodeError):
            self.lines.append(json.loads(line))

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.kill()
        for reader in self._readers:
            reader.join(30)
        if self._process is not None:
            for stream in (self._process.stdout, self._process.stderr):
                stream.close()

    # what it says

    @property
    def output(self) -> str:
        return "".join(["".join(self.stdout[-40:]), "".join(self.stderr[-40:])])

    def said(self, event: str, **values: Any) -> list[dict[str, Any]]:
        """Log lines of this event with these values (a string is searched in the value's text)."""

        def fits(line: dict[str, Any]) -> bool:
            return all(
                value in str(line.get(name, "")) if isinstance(value, str) else line.get(name) == value
                for name, value in values.items()
            )

        return [line for line in list(self.lines) if line.get("event") == event and fits(line)]

    async def says(self, event: str, *, timeout: float = _PATIENCE, **values: Any) -> dict[str, Any]:
        """Wait for such a line; fails at once when the process ends without it."""
        found = await eventually(
            lambda: self.said(event, **values) or not self.running,
            f"{event} {values}",
            timeout=timeout,
            context=lambda: self.output,
        )
        if found is True:
            found = self.said(event, **values)
        assert found, (
            f"the relay ended ({self._process and self._process.poll()}) without {event} {values}\n{self.output}"
        )
        last: dict[str, Any] = found[-1]
        return last

    def http(self, path: str) -> tuple[int, Any]:
        """An answer of the admin endpoint: code and JSON (or text); (0, None) while it does not listen."""
        started = self.said("relay.started")
        if not started:
            return 0, None
        try:
            with _DIRECT.open(f"http://127.0.0.1:{started[-1]['admin_port']}{path}", timeout=10) as answer:
                code, body = answer.status, answer.read()
        except urllib.error.HTTPError as error:
            code, body = error.code, error.read()
        except OSError:
            return 0, None
        try:
            return code, json.loads(body)
        except json.JSONDecodeError:
            return code, body.decode()

    @property
    def status(self) -> dict[str, Any]:
        return self.http("/status")[1] or {}

    def counter(self, name: str) -> int:
        return int(self.status.get("counters", {}).get(name, 0))

    async def ready(self, timeout: float = _PATIENCE) -> None:
        await eventually(lambda: self.http("/readyz")[0] == 200, "ready", timeout=timeout, context=lambda: self.output)

    async def says_again(self, event: str, times: int) -> None:
        """Wait until it has said this more than so many times."""
        await eventually(lambda: len(self.said(event)) > times, f"{event} again", context=lambda: self.output)

    async def has_published(self, count: int, timeout: float = _PATIENCE) -> None:
        """Wait until it counts so many events as published; fails when it ends before."""
        await eventually(
            lambda: self.counter("published_events") >= count or not self.running,
            f"{count} events are published",
            timeout=timeout,
            context=lambda: self.output,
        )
        assert self.running, self.output

    async def streaming(self, timeout: float = _PATIENCE) -> None:
        await self.says("stream.started", timeout=timeout)

    @property
    def resident_bytes(self) -> int:
        try:
            return int(psutil.Process(self.pid).memory_info().rss)
        except psutil.NoSuchProcess:
            return 0

    # what is done to it

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def signal(self, what: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(what)

    def terminate(self) -> None:
        self.signal(signal.SIGTERM)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait(60)

    def freeze(self) -> None:
        freeze([psutil.Process(self.pid)])

    def thaw(self) -> None:
        self.signal(signal.SIGCONT)

    async def ended(self, timeout: float = _PATIENCE) -> int:
        """The exit code, when it has one; everything it said is read then."""
        await eventually(lambda: not self.running, "the relay ends", timeout=timeout, context=lambda: self.output)
        for reader in self._readers:
            await asyncio.to_thread(reader.join, 30)
        assert self._process is not None
        return int(self._process.wait())

    async def stopped(self, timeout: float = _PATIENCE) -> None:
        """SIGTERM, and a clean end."""
        self.terminate()
        code = await self.ended(timeout)
        assert code == 0, self.output

    async def refuses(self, code: int, *texts: str, timeout: float = _PATIENCE) -> str:
        """It ends with this code, says all of these texts on stderr, gives a hint, and shows no traceback."""
        ended = await self.ended(timeout)
        told = "".join(self.stderr)
        assert ended == code, f"exit code {ended}\n{self.output}"
        for text in texts:
            assert text in told, f"{text!r} is not in:\n{told}"
        assert "error: " in told and "hint: " in told, told
        assert "Traceback" not in self.output, self.output
        return told


def _drain(stream: Iterable[str], keep: Callable[[str], None]) -> None:
    with contextlib.suppress(ValueError):  # closed under us
        for line in stream:
            keep(line)


# --- the independent check


class Entry(NamedTuple):
    """A committed event as the writer knows it."""

    id: str
    key: str
    version: int  # grows by one per commit of the key: the aggregate's row is locked until then


class Findings(NamedTuple):
    """What the broker has, against the journal."""

    lost: list[Entry]
    phantom: list[str]
    duplicates: list[str]
    disorder: list[str]


_AGGREGATES = "CREATE TABLE IF NOT EXISTS aggregates (id text PRIMARY KEY, version bigint NOT NULL DEFAULT 0)"
_NEXT = "UPDATE aggregates SET version = version + %s WHERE id = %s RETURNING version"
_INSERT = (
    "INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, topic, payload)"
    " SELECT 'order', %s, 'changed', %s, jsonb_build_object('version', v, 'pad', repeat('x', 60))"
    " FROM generate_series(%s::bigint, %s::bigint) v ORDER BY v RETURNING id::text, (payload->>'version')::bigint"
)


class Ledger:
    """Writers that lock their aggregate, and the journal of what they committed. `dsn` may change while it runs."""

    def __init__(self, dsn: str, topic: str, *, keys: int = 8) -> None:
        self.dsn = dsn
        self.topic = topic
        self.keys = [f"k{number}" for number in range(keys)]
        self.journal: list[Entry] = []
        self.rolled_back: set[str] = set()
        self._uncertain: list[Entry] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()
        with psycopg.connect(dsn, autocommit=True) as connection:
            connection.execute(_AGGREGATES)
            connection.cursor().executemany(
                "INSERT INTO aggregates (id) VALUES (%s) ON CONFLICT DO NOTHING", [(key,) for key in self.keys]
            )

    def write(self, transactions: int, events: int = 1, *, seed: int = 1) -> None:
        """So many transactions, here and now, in one session; every seventh rolls back."""
        with psycopg.connect(self.dsn) as connection:
            chance = random.Random(seed)
            for number in range(transactions):
                self._transaction(connection, chance.choice(self.keys), events, rollback=number % 7 == 6)

    @contextlib.contextmanager
    def writing(self, writers: int = 3, events: int = 3, *, pause: float = 0.002) -> Iterator[None]:
        """Writers in the background until the block ends; they connect again whatever happens to Postgres."""
        self._over.clear()
        self._threads = [
            threading.Thread(target=self._keep_writing, args=(seed, events, pause)) for seed in range(writers)
        ]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join(30)

    def _keep_writing(self, seed: int, events: int, pause: float) -> None:
        chance = random.Random(seed)
        while not self._over.is_set():
            try:
                with psycopg.connect(self.dsn, connect_timeout=5) as connection:
                    for number in itertools.count():
                        if self._over.wait(pause):
                            return
                        key, many = chance.choice(self.keys), chance.randint(1, events)
                        self._transaction(connection, key, many, rollback=number % 7 == 6)
            except psycopg.Error:
                self._over.wait(0.05)

    def _transaction(
        self, connection: psycopg.Connection[tuple[Any, ...]], key: str, events: int, *, rollback: bool
    ) -> None:
        row = connection.execute(_NEXT, (events, key)).fetchone()
        assert row is not None
        last = int(row[0])
        rows = connection.execute(_INSERT, (key, self.topic, last - events + 1, last)).fetchall()
        entries = [Entry(event_id, key, version) for event_id, version in rows]
        if rollback:
            connection.rollback()
            self.rolled_back.update(entry.id for entry in entries)
            return
        try:
            connection.commit()
        except psycopg.Error:
            self._uncertain += entries  # Postgres died under the commit: the table will tell
            raise
        self.journal += entries

    def settle(self) -> None:
        """Ask the table about commits that nobody answered."""
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            found = connection.execute(
                "SELECT id::text FROM outbox_events WHERE id = ANY(%s::uuid[])",
                ([entry.id for entry in self._uncertain],),
            ).fetchall()
        known = {row[0] for row in found}
        self.journal += [entry for entry in self._uncertain if entry.id in known]
        self._uncertain = []

    @property
    def ids(self) -> set[str]:
        return {entry.id for entry in self.journal}

    def compare(self, stored: Iterable[Stored]) -> Findings:
        """`stored` in the order of the broker (for Kafka: of each partition; a key has one)."""
        self.settle()
        first: dict[str, Stored] = {}
        duplicates: list[str] = []
        for item in stored:
            event_id = item.id.decode()
            if event_id in first:
                duplicates.append(event_id)
                assert item.body == first[event_id].body, f"{event_id} came again with another body"
            else:
                first[event_id] = item
        known = {entry.id: entry for entry in self.journal}
        order: dict[str, list[int]] = defaultdict(list)
        for event_id in first:
            if event_id in known:
                order[known[event_id].key].append(known[event_id].version)
        disorder = [key for key, versions in order.items() if versions != sorted(versions)]
        lost = [entry for entry in self.journal if entry.id not in first]
        return Findings(lost, [event_id for event_id in first if event_id not in known], duplicates, disorder)

    def check(self, stored: Iterable[Stored], *, duplicates: int = 0) -> Findings:
        """Nothing lost, nothing invented, order kept, and at most so many duplicates."""
        findings = self.compare(stored)
        assert not findings.lost, f"lost {len(findings.lost)} of {len(self.journal)}: {findings.lost[:3]}"
        invented = [event_id for event_id in findings.phantom if event_id in self.rolled_back]
        assert not findings.phantom, f"phantom {len(findings.phantom)}, rolled back {len(invented)}"
        assert not findings.disorder, f"order broken for {findings.disorder}"
        assert len(findings.duplicates) <= duplicates, f"{len(findings.duplicates)} duplicates"
        return findings

    async def arrived(
        self, read: Callable[[], Awaitable[list[Stored]]], relay: RelayProcess | None = None, timeout: float = 90.0
    ) -> list[Stored]:
        """Wait until the broker holds all that the journal has; what it holds then."""
        self.settle()
        deadline, stored = time.monotonic() + timeout, await read()
        while not self.ids <= {item.id.decode() for item in stored}:
            missing = len(self.ids - {item.id.decode() for item in stored})
            output = relay.output if relay else ""
            assert time.monotonic() < deadline, f"{missing} of {len(self.journal)} not there in time\n{output}"
            assert relay is None or relay.running, f"the relay ended; {missing} missing\n{output}"
            await asyncio.sleep(0.1)
            stored = await read()
        return stored
