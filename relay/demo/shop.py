"""The shop: what an application does. The business change and its event are one transaction, so neither is ever alone.

Some transactions roll back on purpose (out of stock, card declined); their events must never be seen by anybody.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass
from math import ceil

import psycopg
from psycopg.types.json import Jsonb

from relay.demo.ledger import STEPS, Ledger
from relay.source.session import translated

_TABLE = """
CREATE TABLE orders (
    id        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    customer  text NOT NULL,
    total     numeric(10, 2) NOT NULL,
    status    text NOT NULL
)
"""
_PLACE = "INSERT INTO orders (customer, total, status) VALUES (%s, %s, 'placed') RETURNING id"
_ADVANCE = "UPDATE orders SET status = %s WHERE id = %s"
_EVENT = """
INSERT INTO outbox_events (aggregate_type, aggregate_id, event_type, payload)
VALUES ('order', %s, %s, %s) RETURNING id::text
"""

_CLERKS = range(4, 17)
_PER_CLERK = 50  # transactions a second, with ease
_ROLLED_BACK = 0.05  # of the transactions
_NEW = 0.4  # of the transactions open an order while others are under way
_UNDER_WAY = 50  # orders per clerk, at most
_CUSTOMERS = ("Ada", "Edsger", "Grace", "Barbara", "Leslie", "Donald", "Frances", "Tony")

Session = psycopg.AsyncConnection[tuple[object, ...]]


@dataclass(slots=True)
class _Order:
    customer: str
    total: float
    step: int = 0
    id: str = ""


class Shop:
    """Clerks who take orders through their steps, `rate` transactions a second in all."""

    def __init__(self, dsn: str, ledger: Ledger, rate: float) -> None:
        self._dsn = dsn
        self._ledger = ledger
        self._clerks = min(_CLERKS[-1], max(_CLERKS[0], ceil(rate / _PER_CLERK)))
        self._pause = self._clerks / rate
        self._random = random.Random()  # noqa: S311 - a shop, not a vault

    async def open(self) -> None:
        with translated():
            async with await Session.connect(self._dsn, autocommit=True) as session:
                await session.execute(_TABLE)

    async def run(self, stop: asyncio.Event) -> None:
        """Serve until told to stop; no transaction is cut off."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._clerks):
                group.create_task(self._clerk(stop))

    async def _clerk(self, stop: asyncio.Event) -> None:
        with translated():
            async with await Session.connect(self._dsn, autocommit=True) as session:
                under_way: deque[_Order] = deque()
                due = time.monotonic()
                while not stop.is_set():
                    now = time.monotonic()
                    if due > now:
                        await asyncio.sleep(min(due - now, 0.1))  # in short naps: to hear of the end soon
                        continue
                    # Customers do not come in step; and nobody works off in a rush what could not be done in time.
                    due = max(due, now - 0.5) + self._random.expovariate(1.0) * self._pause
                    order = self._pick(under_way)
                    if await self._serve(session, order):
                        order.step += 1
                    if 0 < order.step < len(STEPS):
                        under_way.append(order)

    def _pick(self, under_way: deque[_Order]) -> _Order:
        if under_way and (len(under_way) >= _UNDER_WAY or self._random.random() >= _NEW):
            return under_way.popleft()
        return _Order(self._random.choice(_CUSTOMERS), round(self._random.uniform(5, 500), 2))

    async def _serve(self, session: Session, order: _Order) -> bool:
        """One step of an order: the change and its event, together or not at all."""
        fails = self._random.random() < _ROLLED_BACK
        step = STEPS[order.step]
        async with session.transaction(force_rollback=fails):
            if order.step == 0:
                order.id = str(await _value(session, _PLACE, order.customer, order.total))
            else:
                await session.execute(_ADVANCE, (step, order.id))
            payload = Jsonb({"order": int(order.id), "customer": order.customer, "total": order.total, "status": step})
            event_id = str(await _value(session, _EVENT, order.id, step, payload))
            if not fails:
                self._ledger.commit_sent(event_id, time.monotonic())
        if fails:
            self._ledger.rollback_done()
        else:
            self._ledger.commit_done()
        return not fails


async def _value(session: Session, statement: str, *arguments: object) -> object:
    row = await (await session.execute(statement.encode(), arguments)).fetchone()
    assert row is not None
    return row[0]
