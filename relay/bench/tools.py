"""Who is measured: the relay, as users run it, and `pg_recvlogical` to nowhere as the limit.

A tool says how it is prepared (its slot must exist before the rows), how it is started, and how far it is.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from relay import __version__
from relay.bench.arena import Round
from relay.bench.meter import written
from relay.bench.modes import Mode
from relay.bench.process import Child, postgres_tool, until
from relay.bench.result import LIMIT, Sample
from relay.embedded.process import free_port

_START = 120.0
_STILL = 16
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # loopback needs no proxy


class Tool(Protocol):
    """Something that takes events out of the table or its slot."""

    name: str
    mode: str
    slot: str  # "": it has none
    stores: bool  # into the broker
    pipe: Path | None  # where it writes what it reads, if somebody shall hear that instead
    interval: float  # between two looks at how far it is
    facts: Mapping[str, Any]  # for the result: version, configuration, command

    async def prepare(self) -> None:
        """Make what must exist before the rows: the slot, offsets, a first checkpoint. The table is there, empty."""

    def process(self) -> Child:
        """A new process; the caller starts and ends it. May be asked for again after the last one ended."""
        ...

    async def ready(self, child: Child) -> None:
        """Return when the started process waits for events."""

    async def moved(self) -> int:
        """How far the started process is: events or bytes."""
        ...

    async def finished(self, samples: Sequence[Sample], rows: int) -> bool: ...


class StoringTool:
    """What most tools answer: the broker's count says how far they are."""

    stores = True
    pipe: Path | None = None
    interval = 0.05
    slot = ""
    facts: Mapping[str, Any] = {}

    def __init__(self, place: Round) -> None:
        self.place = place

    async def ready(self, child: Child) -> None:
        """A slot in use is the sign; without a slot there is none but a running process."""

        async def reading() -> bool:
            child.must_run()
            return not self.slot or await self.place.walsender(self.slot) is not None

        await until(reading, _START, f"{child.name} does not read its slot")

    async def moved(self) -> int:
        return await self.place.stored()

    async def finished(self, samples: Sequence[Sample], rows: int) -> bool:
        return bool(samples) and samples[-1].moved >= rows


class RelayTool(StoringTool):
    """`relay run` with nothing but the addresses and the mode configured."""

    name = "relay"

    def __init__(self, place: Round, mode: Mode, folder: Path) -> None:
        super().__init__(place)
        self.mode = mode.name
        self._relay = f"{place.name}_relay"
        self.slot = self._relay if mode.streams else ""
        self._file = folder / f"{self._relay}.toml"
        self._admin = f"127.0.0.1:{free_port()}"
        self._streams = mode.streams
        tree: dict[str, Any] = {
            "relay": {"name": self._relay},
            "database": {"dsn": place.dsn},
            "source": {"slot": self._relay},
            # Where the default is "events.…": the destination is this round's own.
            "routing": {"fallback_topic": f"{place.name}.{{aggregate_type}}.{{event_type}}"},
            "sink": place.broker.sink(place.name, place.sink),
            "admin": {"listen": self._admin},
        }
        for section, values in mode.config.items():
            if isinstance(values, Mapping):
                tree.setdefault(section, {}).update(values)
            else:
                tree[section] = values
        self._file.touch(mode=0o600)  # the DSN may hold a password
        self._file.write_text(toml(tree))
        self.facts = {
            "version": __version__,
            "command": "relay run",
            "configuration": {**mode.config, "sink": {place.sink.kind: dict(place.sink.config)}},
        }

    async def prepare(self) -> None:
        with self.process() as child:
            await self.ready(child)
            child.stop()

    def process(self) -> Child:
        command = [sys.executable, "-m", "relay", "run", "--config", str(self._file)]
        return Child("relay", command, codes=(0, -15))  # there may be nothing left to do before it is up

    async def ready(self, child: Child) -> None:
        """Wait until the relay streams (destination there, checkpoint saved, slot in use) or polls."""

        async def waits() -> bool:
            child.must_run()
            if not await self.place.broker.exists(self.place.name):
                return False
            return await (self._slot_in_use() if self._streams else asyncio.to_thread(self._polls))

        await until(waits, _START, f"the relay was not ready in mode {self.mode}", 0.05)

    async def _slot_in_use(self) -> bool:
        return bool(
            await self.place.value(
                """
                SELECT count(*) FROM outbox_relay_checkpoint c JOIN pg_replication_slots s ON s.slot_name = c.slot
                WHERE c.relay = %s AND c.phase = 'stream' AND s.active
                """,
                self._relay,
            )
        )

    def _polls(self) -> bool:
        try:
            with _DIRECT.open(f"http://{self._admin}/readyz", timeout=2.0) as answer:
                return bool(json.load(answer)["state"] == "polling")
        except OSError:  # also what urllib raises for 503
            return False

    async def finished(self, samples: Sequence[Sample], rows: int) -> bool:
        if not self.place.sink.transactions:
            return await super().finished(samples, rows)
        # Markers are counted, too: it has ended when there are enough and no more come.
        last = samples[-_STILL:]
        return len(last) == _STILL and last[0].moved >= rows and last[0].moved == last[-1].moved


class RecvLogical:
    """The limit: Postgres' own client, same plugin and options, to the null device or into a pipe."""

    name = LIMIT
    stores = False
    interval = 0.02
    facts: Mapping[str, Any] = {}

    def __init__(self, place: Round, mode: Mode, pipe: Path | None = None) -> None:
        self.mode = mode.name
        self.slot = f"{place.name}_limit"
        self.pipe = pipe
        self._round = place
        self._plugin = mode.plugin
        self._options = mode.plugin_options
        self._binary = postgres_tool("pg_recvlogical", place.arena.bindir)
        self._child: Child | None = None

    async def prepare(self) -> None:
        await self._round.value("SELECT pg_create_logical_replication_slot(%s, %s)", self.slot, self._plugin)

    def process(self) -> Child:
        into = str(self.pipe or "/dev/null")
        command = [self._binary, "--start", "--no-loop", "-d", self._round.dsn, "-S", self.slot, "-f", into]
        command += ["-F", "0"]  # no fsync, which neither of them can do
        for name, value in self._options.items():
            command += ["-o", f"{name}={value}"]
        self._child = Child(LIMIT, command, codes=(0, -15))  # before 16 it knows only SIGINT
        self.facts = {"version": self._round.arena.postgres_version, "command": f"{LIMIT} {' '.join(command[-4:])}"}
        return self._child

    async def ready(self, child: Child) -> None:
        async def reading() -> bool:
            child.must_run()
            return await self._round.walsender(self.slot) is not None

        await until(reading, _START, f"{LIMIT} does not read its slot")

    async def moved(self) -> int:
        return written(self._child.pid) if self._child is not None else 0

    async def finished(self, samples: Sequence[Sample], rows: int) -> bool:  # noqa: ARG002
        """Nothing more is written, and Postgres has sent all there is. It is only asked when it looks like that."""
        last = [sample.moved for sample in samples[-4:]]
        if len(last) < 4 or not last[0] or last[0] != last[-1]:
            return False
        return bool(
            await self._round.value(
                """
                SELECT r.sent_lsn >= pg_current_wal_flush_lsn() FROM pg_stat_replication r
                JOIN pg_replication_slots s ON s.active_pid = r.pid WHERE s.slot_name = %s
                """,
                self.slot,
            )
        )


def toml(tree: Mapping[str, Any]) -> str:
    """Nested sections as TOML. JSON's strings, numbers, booleans and lists of them are TOML already."""
    return "".join(f"{key} = {_toml_value(value)}\n" for key, value in tree.items())


def _toml_value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_toml_value(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(_toml_value(each) for each in value) + "]"
    return json.dumps(value, ensure_ascii=False)
