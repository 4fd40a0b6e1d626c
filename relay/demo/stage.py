"""The stage: starts the servers, the relay, the shop and the consumer, watches them, and takes everything down again.

Starting and stopping block and are plain code around the event loop, so that Ctrl-C between two servers unwinds like
any exception. When the shop has closed, what is still owed is waited for before anybody is judged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import aiohttp
from rich.console import Console

from relay.demo.consumer import Consumer, JetStreamConsumer, KafkaConsumer
from relay.demo.ledger import Ledger, Summary
from relay.demo.process import STREAM, TOPIC, RelayProcess
from relay.demo.shop import Shop
from relay.demo.signals import Signals, first_sets
from relay.demo.view import Scene, View
from relay.embedded import KafkaServer, NatsServer, PostgresServer
from relay.errors import RelayError
from relay.setup import setup

_WATCH = 0.25
_PATIENCE = 30.0  # without any arrival, before what is owed counts as lost


class Stage:
    """One performance of the demo."""

    def __init__(self, *, rate: float, seconds: float, kafka: bool, kill_every: float | None) -> None:
        self._seconds = seconds
        self._kafka = kafka
        self._kill_every = kill_every
        self._rate = rate
        self._console = Console(stderr=True, highlight=False)  # talk; the result goes to stdout
        self._ledger = Ledger()
        self._restarting = False

    def play(self) -> Summary:
        """Until the time is over or a signal came; a second signal ends it without a verdict."""
        self._signals = Signals()
        with ExitStack() as stack:
            postgres = self._start(stack, "PostgreSQL 18", partial(PostgresServer, "18"))
            dsn = postgres.create_database("shop")
            consumer: Consumer
            if self._kafka:
                kafka = self._start(stack, "Kafka (the first time Maven fetches it)", KafkaServer)
                consumer, broker, name = KafkaConsumer(kafka.bootstrap, TOPIC), kafka.bootstrap, "Kafka"
            else:
                server = self._start(stack, "nats-server", NatsServer)
                consumer, broker, name = JetStreamConsumer(server.url, STREAM), server.url, "NATS JetStream"
            relay = RelayProcess(dsn, broker, kafka=self._kafka)
            stack.callback(relay.close)
            self._scene = Scene(broker=name, admin_url=relay.admin_url, ledger=self._ledger)
            self._signals.interrupt()
            try:
                return asyncio.run(self._perform(relay, Shop(dsn, self._ledger, self._rate), consumer))
            except* RelayError as group:
                raise _first(group) from None
            finally:
                self._console.print("[dim]stopping …[/]")

    def _start(self, stack: ExitStack, what: str, make: Callable[[], Any]) -> Any:
        self._console.print(f"[dim]starting {what} …[/]")
        try:
            return stack.enter_context(make())
        finally:
            self._signals.act()  # also in place of an error: Ctrl-C in a terminal ends what fetches a server, too

    async def _perform(self, relay: RelayProcess, shop: Shop, consumer: Consumer) -> Summary:
        await setup(relay.config)
        await shop.open()
        self._console.print("[dim]starting the relay …[/]")
        await asyncio.to_thread(relay.start)
        stop = asyncio.Event()
        started = self._scene.started = time.monotonic()
        async with asyncio.TaskGroup() as group, first_sets(stop):
            behind = [
                group.create_task(consumer.run(self._ledger.arrived)),
                group.create_task(self._watch(relay)),
                group.create_task(View(self._console, self._scene).run()),
            ]
            if self._seconds:
                asyncio.get_running_loop().call_later(self._seconds, stop.set)
            async with asyncio.TaskGroup() as front:
                front.create_task(shop.run(stop))
                if self._kill_every is not None:
                    front.create_task(self._chaos(relay, self._kill_every, stop))
            took = time.monotonic() - started
            self._scene.say("the shop is closed; waiting for what is still under way")
            await self._drain()
            await self._look(relay)
            for task in behind:
                task.cancel()
        return self._ledger.summary(seconds=took, kills=self._scene.kills, dropped_by_broker=self._scene.dropped)

    async def _chaos(self, relay: RelayProcess, every: float, stop: asyncio.Event) -> None:
        """kill -9, again and again, at whatever the relay is doing."""
        while True:
            try:
                async with asyncio.timeout(every):
                    await stop.wait()
                return
            except TimeoutError:
                pass
            await self._look(relay)
            self._restarting = True
            self._scene.dropped_before, self._scene.status = self._scene.dropped, {}
            self._scene.kills += 1
            self._scene.say(f"killed the relay: kill -9 {relay.pid}")
            before = time.monotonic()
            await asyncio.to_thread(relay.kill)
            await asyncio.to_thread(relay.start)
            self._restarting = False
            self._scene.say(f"the relay is back after {time.monotonic() - before:.1f} s, as pid {relay.pid}")

    async def _drain(self) -> None:
        """Wait for what is owed, as long as anything arrives."""
        since = time.monotonic()
        while self._ledger.owed and time.monotonic() - max(since, self._ledger.last_arrival) < _PATIENCE:  # noqa: ASYNC110
            await asyncio.sleep(0.02)

    async def _watch(self, relay: RelayProcess) -> None:
        while True:
            if not self._restarting:
                if not relay.is_running:
                    raise RelayError("the relay ended by itself", hint=f"its log ends with:\n{relay.log_tail()}")
                await self._look(relay)
            await asyncio.sleep(_WATCH)

    async def _look(self, relay: RelayProcess) -> None:
        """Read the relay's own numbers where an operator would."""
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=1.0)) as client,
                client.get(f"{relay.admin_url}/status") as answer,
            ):
                status = await answer.json()
        except (aiohttp.ClientError, OSError, TimeoutError):
            status = {}
        if not self._restarting:
            self._scene.status = status


def _first(group: BaseExceptionGroup[Any]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
