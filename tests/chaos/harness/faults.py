"""How each kind of fault is done, and undone. A fault leaves the stage as it found it, whatever happens meanwhile.

Faults of one target exclude each other, so that a thaw never meets another fault's frozen process; faults of different
targets may overlap.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, LiteralString

import nats
import nats.errors
import orjson
import psycopg

from relay.embedded import EmbeddedError
from tests.chaos.harness.schedule import KINDS, Fault
from tests.chaos.harness.stage import SLOT, STREAMS, Stage
from tests.chaos.harness.tail import Arrivals
from tests.chaos.harness.writers import Journal, prepared_transaction, slow_transaction

_END: LiteralString = (
    "SELECT pg_terminate_backend(active_pid) FROM pg_replication_slots WHERE slot_name = %s AND active_pid IS NOT NULL"
)
_LOOK: LiteralString = "SELECT confirmed_flush_lsn IS NOT NULL FROM pg_replication_slots WHERE slot_name = %s"
_DROP: LiteralString = "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s"


@dataclass
class Injected:
    """A fault that was done; times are monotonic. `recovered`: the first event committed after its end arrived."""

    number: int
    kind: str
    began: float
    ended: float = 0.0
    effect: str = "done"
    probed: float | None = None
    recovered: float | None = None

    @property
    def seconds_to_recover(self) -> float | None:
        return None if self.recovered is None or self.probed is None else max(self.recovered - self.probed, 0.0)


class Injector:
    """Does faults on the stage; `problems` is what the servers' own rules forbid, such as a stop that hangs."""

    def __init__(self, stage: Stage, journal: Journal, arrivals: Arrivals, seed: int, overlap: int) -> None:
        self._stage, self._journal, self._arrivals = stage, journal, arrivals
        self._seed = seed
        self._targets: dict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._room = asyncio.Semaphore(max(overlap, 1))
        self.injected: list[Injected] = []
        self.problems: list[str] = []

    async def run(self, fault: Fault) -> None:
        async with self._targets[KINDS[fault.kind].target], self._room:
            await self._one(fault)

    async def _one(self, fault: Fault) -> None:
        record = Injected(fault.number, fault.kind, time.monotonic())
        self.injected.append(record)
        how: Callable[[Fault], Awaitable[str | None]] = getattr(self, "_" + fault.kind.replace("-", "_"))
        try:
            record.effect = await how(fault) or "done"
        except (psycopg.Error, OSError, nats.errors.Error) as error:  # another fault was in the way of this one
            record.effect = f"missed: {type(error).__name__}"
        record.ended = time.monotonic()
        self._watch(record)

    def _watch(self, record: Injected) -> None:
        def came(at: float) -> None:
            record.recovered = at

        def committed(event_id: Any, at: float) -> None:
            record.probed = at
            self._arrivals.tell(event_id, came)

        self._journal.probes.append(committed)

    async def drop_every_second(self, over: asyncio.Event) -> None:
        number = -1
        while not over.is_set():
            async with self._targets["slot"]:
                await self._one(Fault(number, 0.0, "slot-drop", 0.0, 0.0))
            number -= 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), 1.0)

    # --- relays

    async def _relay_kill(self, _fault: Fault) -> None:
        (await self._stage.active()).signal(signal.SIGKILL)

    async def _relay_stop(self, _fault: Fault) -> str | None:
        relay = await self._stage.active()
        started = relay.started
        relay.signal(signal.SIGTERM)
        deadline = time.monotonic() + 20.0
        while relay.started == started and relay.running:
            if time.monotonic() > deadline:
                self.problems.append(f"{relay.name} did not end within 20 s of SIGTERM")
                relay.signal(signal.SIGKILL)
                return "killed"
            await asyncio.sleep(0.05)
        return None

    async def _relay_freeze(self, fault: Fault) -> None:
        relay = await self._stage.active()
        relay.signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            relay.signal(signal.SIGCONT)

    async def _relay_clock(self, fault: Fault) -> str | None:
        if self._stage.clock is None:
            return "missed: no libfaketime"
        try:
            self._stage.clock.write_text(f"{(fault.luck - 0.5) * 14400:+.0f}\n")
            await asyncio.sleep(fault.seconds)
        finally:
            self._stage.clock.write_text("+0\n")
        return None

    # --- the broker

    async def _broker_kill(self, fault: Fault) -> None:
        await asyncio.to_thread(self._stage.broker.kill)
        await asyncio.sleep(fault.seconds)
        await asyncio.to_thread(self._stage.broker.start)

    async def _broker_stop(self, fault: Fault) -> None:
        try:
            await asyncio.to_thread(self._stage.broker.stop)
        except EmbeddedError:  # Kafka waits for its controller now and then; not the relay's doing
            await asyncio.to_thread(self._stage.broker.kill)
        await asyncio.sleep(fault.seconds)
        await asyncio.to_thread(self._stage.broker.start)

    async def _broker_freeze(self, fault: Fault) -> None:
        self._stage.broker.freeze()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            self._stage.broker.thaw()

    async def _broker_full(self, fault: Fault) -> str | None:
        """A few messages more, then "maximum messages exceeded", until the limit is lifted."""
        limits = {}
        client = await nats.connect(self._stage.broker.url, allow_reconnect=False, connect_timeout=2)  # type: ignore[union-attr]
        try:
            for stream in STREAMS:
                info = orjson.loads((await client.request(f"$JS.API.STREAM.INFO.{stream}", timeout=2)).data)
                if "config" not in info:
                    return "missed: no stream yet"
                limits[stream] = info["config"]
                full = {**info["config"], "max_msgs": info["state"]["messages"] + 20, "discard": "new"}
                await client.request(f"$JS.API.STREAM.UPDATE.{stream}", orjson.dumps(full), timeout=2)
            await asyncio.sleep(fault.seconds)
        finally:
            for stream, config in limits.items():
                answer = await client.request(f"$JS.API.STREAM.UPDATE.{stream}", orjson.dumps(config), timeout=10)
                assert "error" not in orjson.loads(answer.data), answer.data
            await client.close()
        return None

    # --- Postgres

    async def _postgres_restart(self, _fault: Fault) -> str | None:
        server = self._stage.postgres
        try:
            await asyncio.to_thread(server.stop)
        except EmbeddedError:
            self.problems.append("Postgres did not stop (fast) within 30 s (G11)")
            await asyncio.to_thread(server.kill)
        await asyncio.to_thread(server.start)
        return None

    async def _postgres_immediate(self, _fault: Fault) -> None:
        await asyncio.to_thread(self._stage.postgres.restart, "immediate")

    async def _postgres_kill(self, fault: Fault) -> None:
        await asyncio.to_thread(self._stage.postgres.kill)
        await asyncio.sleep(fault.seconds)
        await asyncio.to_thread(self._stage.postgres.start)

    async def _walsender_end(self, _fault: Fault) -> str | None:
        async with await self._connect() as connection:
            ended = await (await connection.execute(_END, (SLOT,))).fetchall()
        return None if ended else "missed: no walsender"

    async def _slot_drop(self, fault: Fault) -> str | None:
        """A slot that is still being made is left alone every other time: else one a second would never be there."""
        async with await self._connect() as connection:
            for _ in range(40):
                row = await (await connection.execute(_LOOK, (SLOT,))).fetchone()
                if row is None:
                    return "missed: no slot"
                if not row[0] and fault.number % 2:
                    return "missed: in the making"
                ended = await (await connection.execute(_END, (SLOT,))).fetchall()
                with contextlib.suppress(psycopg.errors.ObjectInUse):
                    dropped = await (await connection.execute(_DROP, (SLOT,))).fetchall()
                    return "done" if dropped else "done: ended while in the making" if ended else "missed: no slot"
                await asyncio.sleep(0.01)
        return "missed: in use"

    async def _slow_transaction(self, fault: Fault) -> None:
        key, chance = f"slow-{fault.number}", random.Random(f"{self._seed}/{fault.number}")
        await slow_transaction(self._stage.dsn, self._journal, key, fault.seconds, chance)

    async def _prepared_transaction(self, fault: Fault) -> None:
        key, chance = f"prepared-{fault.number}", random.Random(f"{self._seed}/{fault.number}")
        await prepared_transaction(self._stage.dsn, self._journal, key, fault.seconds, chance)

    async def _connect(self) -> psycopg.AsyncConnection[tuple[Any, ...]]:
        return await psycopg.AsyncConnection.connect(self._stage.dsn, autocommit=True, connect_timeout=3)

    # --- the network

    async def _broker_cut(self, _fault: Fault) -> None:
        await self._stage.broker_link.cut()

    async def _postgres_cut(self, _fault: Fault) -> None:
        await self._stage.postgres_link.cut()

    async def _broker_refuse(self, fault: Fault) -> None:
        try:
            await self._stage.broker_link.refuse()
            await asyncio.sleep(fault.seconds)
        finally:
            await self._stage.broker_link.resume()

    async def _broker_stall(self, fault: Fault) -> None:
        await _stall(self._stage.broker_link, fault)

    async def _postgres_stall(self, fault: Fault) -> None:
        await _stall(self._stage.postgres_link, fault)

    async def _broker_delay(self, fault: Fault) -> None:
        await _delay(self._stage.broker_link, fault)

    async def _postgres_delay(self, fault: Fault) -> None:
        await _delay(self._stage.postgres_link, fault)


async def _stall(link: Any, fault: Fault) -> None:
    """In both directions or in one: then our words arrive and the answers do not, or the other way round."""
    link.stall(("both", "both", "up", "down")[int(fault.luck * 4)])
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        await link.resume()


async def _delay(link: Any, fault: Fault) -> None:
    link.delay = 0.02 + 0.15 * fault.luck
    try:
        await asyncio.sleep(fault.seconds)
    finally:
        link.delay = 0.0
