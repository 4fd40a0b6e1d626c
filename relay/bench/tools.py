"""Who is measured: the relay, as users run it, and `pg_recvlogical` to nowhere as the limit.

A tool says how it is prepared (its slot must exist before the rows), how it is started, and how far it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from relay.bench.arena import Round
from relay.bench.meter import written
from relay.bench.plan import Mode
from relay.bench.process import Child, postgres_tool, until
from relay.bench.result import LIMIT, Sample
from relay.config import load

_START = 30.0


class Tool(Protocol):
    """Something that empties a slot."""

    name: str
    mode: str
    slot: str
    stores: bool  # into the broker
    interval: float  # between two looks at how far it is

    async def prepare(self) -> None:
        """Make the slot, on the empty table."""

    def process(self) -> Child:
        """A new process; the caller starts and ends it."""
        ...

    async def moved(self) -> int:
        """How far the started process is: events or bytes."""
        ...

    async def finished(self, samples: Sequence[Sample], rows: int) -> bool: ...


class RelayTool:
    """`relay run` with nothing but the addresses configured."""

    name = "relay"
    stores = True
    interval = 0.05

    def __init__(self, place: Round, mode: Mode, folder: Path) -> None:
        self.mode = mode.name
        self.slot = f"{place.name}_relay"
        self._round = place
        self._file = folder / f"{self.slot}.toml"
        tree: dict[str, Any] = {
            "relay": {"name": self.slot},
            "database": {"dsn": place.dsn},
            "source": {"slot": self.slot},
            # Where the default is "events.…": the destination is this round's own.
            "routing": {"fallback_topic": f"{place.name}.{{aggregate_type}}.{{event_type}}"},
            "sink": place.broker.sink(place.name),
            "admin": {"listen": "127.0.0.1:0"},
        }
        for section, values in mode.config.items():
            tree.setdefault(section, {}).update(values)
        self._file.touch(mode=0o600)  # the DSN may hold a password
        self._file.write_text(toml(tree))

    async def prepare(self) -> None:
        await self._round.set_up(load(self._file, {}))
        with self.process() as child:
            await self.streaming(child)
            child.stop()

    def process(self) -> Child:
        return Child("relay", [sys.executable, "-m", "relay", "run", "--config", str(self._file)])

    async def streaming(self, child: Child) -> None:
        """Wait until the relay streams: destination there, checkpoint saved, slot in use."""

        async def streams() -> bool:
            child.must_run()
            return await self._round.broker.exists(self._round.name) and bool(
                await self._round.value(
                    """
                    SELECT count(*) FROM outbox_relay_checkpoint c JOIN pg_replication_slots s ON s.slot_name = c.slot
                    WHERE c.relay = %s AND c.phase = 'stream' AND s.active
                    """,
                    self.slot,
                )
            )

        await until(streams, _START, "the relay did not stream")

    async def moved(self) -> int:
        return await self._round.stored()

    async def finished(self, samples: Sequence[Sample], rows: int) -> bool:
        return bool(samples) and samples[-1].moved >= rows


class RecvLogical:
    """The limit: Postgres' own client, same plugin and options, to the null device."""

    name = LIMIT
    stores = False
    interval = 0.02

    def __init__(self, place: Round, mode: Mode) -> None:
        self.mode = mode.name
        self.slot = f"{place.name}_limit"
        self._round = place
        self._plugin = mode.plugin
        self._options = mode.plugin_options
        self._binary = postgres_tool("pg_recvlogical", place.arena.bindir)
        self._child: Child | None = None

    async def prepare(self) -> None:
        await self._round.value("SELECT pg_create_logical_replication_slot(%s, %s)", self.slot, self._plugin)

    def process(self) -> Child:
        command = [self._binary, "--start", "--no-loop", "-d", self._round.dsn, "-S", self.slot, "-f", "/dev/null"]
        command += ["-F", "0"]  # no fsync, which the null device would refuse
        for name, value in self._options.items():
            command += ["-o", f"{name}={value}"]
        self._child = Child(LIMIT, command)
        return self._child

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
