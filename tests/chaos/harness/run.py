"""The conductor: stage, writers, faults, then quiet, then the verdict."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.chaos.harness import verifier
from tests.chaos.harness.faults import Injector
from tests.chaos.harness.report import Report, make_report
from tests.chaos.harness.schedule import Options, kinds, schedule
from tests.chaos.harness.stage import Stage, create_topics, libfaketime, stage
from tests.chaos.harness.tail import Arrivals, tail_jetstream, tail_kafka
from tests.chaos.harness.verifier import Comparison, Findings
from tests.chaos.harness.writers import Entry, Journal, Pace, Writer, dead_letters, end_prepared, prepare, table

Say = Callable[[str], None]


async def run(options: Options, say: Say = print) -> Report:
    """One run from the first server to the report; raises only when the harness itself is at fault."""
    clock = "relay-clock" in kinds(options) and libfaketime() is not None
    if "relay-clock" in kinds(options) and not clock:
        say("no clock jumps: libfaketime is not installed (Debian: apt-get install faketime)")
    say(f"repeat with: {options.command()}")
    async with stage(options, options.report, clock=clock) as on_stage:
        if options.broker == "kafka":
            await asyncio.to_thread(create_topics, on_stage.broker.bootstrap)  # type: ignore[union-attr]
        return await _Run(options, on_stage, say).run()


async def run_within(seconds: float, options: Options, say: Say = print) -> Report:
    """The same with a bound; a run that exceeds it tells what it waits for, and what everybody on stage said last."""
    running = asyncio.create_task(run(options, say))
    try:
        if (await asyncio.wait({running}, timeout=seconds))[0]:
            return await running
        waiting = "\n".join(sorted(map(_whereabouts, asyncio.all_tasks())))
    finally:
        running.cancel()
        await asyncio.wait({running}, timeout=30.0)
    raise TimeoutError(f"not over within {seconds:g} s\n\n{waiting}\n\n{_last_words(options.report)}")


def _whereabouts(task: asyncio.Task[Any]) -> str:
    """All that it awaits, from the outside in; `Task.get_stack` knows the outermost only."""
    places = []
    link: Any = task.get_coro()
    while (frame := getattr(link, "cr_frame", None)) is not None:
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}")
        link = link.cr_await
    return " > ".join(places)


def _last_words(folder: Path) -> str:
    tails = []
    for path in sorted([*folder.glob("*.log"), *folder.glob("*.err")]):
        lines = path.read_text(errors="replace").splitlines()[-12:]
        tails.append("\n".join([f"--- {path.name}", *lines]))
    return "\n".join(tails)


class _Run:
    def __init__(self, options: Options, on_stage: Stage, say: Say) -> None:
        self._options, self._stage, self._say = options, on_stage, say
        self._journal, self._arrivals = Journal(), Arrivals()
        self._injector = Injector(on_stage, self._journal, self._arrivals, options.seed, options.overlap)
        rate = options.events / options.seconds
        self._pace = Pace(rate, options.events, lambda: self._pending > options.backlog)
        self._keys = [f"k{number}" for number in range(options.keys)]
        self._problems: list[str] = []

    @property
    def _pending(self) -> int:
        return len(self._journal.committed) - len(self._arrivals.seen)

    async def run(self) -> Report:
        await prepare(self._stage.dsn, self._keys)
        began = time.monotonic()
        async with asyncio.TaskGroup() as group:
            background = [group.create_task(self._tail()), group.create_task(self._tell())]
            keepers = [group.create_task(relay.keep()) for relay in self._stage.relays]
            await self._storm(began)
            quiet = time.monotonic()
            self._say(f"{quiet - began:5.0f} s  faults are over; waiting until everything has arrived")
            committed = await self._settle()
            settled = time.monotonic()
            self._say(f"{settled - began:5.0f} s  the relays are asked to stop")
            codes = await asyncio.gather(*(relay.stop() for relay in self._stage.relays))
            for relay, code in zip(self._stage.relays, codes, strict=True):
                if code != 0:
                    self._problems.append(f"{relay.name} ended with {code} when it was asked to stop")
            await asyncio.gather(*keepers)
            for task in background:
                task.cancel()
        self._say(f"{time.monotonic() - began:5.0f} s  the broker is read from its first message to its last")
        findings = await self._verdict(committed)
        vanished = len(self._journal.committed - {entry.id for entry in committed})
        if vanished:
            self._problems.append(f"Postgres does not have {vanished} events whose COMMIT it answered")
        if dead := await dead_letters(self._stage.dsn):
            self._problems.append(f"{dead} dead letters: no event of this run deserves that")
        self._problems += self._injector.problems
        injected, problems = self._injector.injected, self._problems
        report = make_report(
            self._options, findings, injected, self._journal, self._arrivals, self._stage, problems, began
        )
        report.times |= {"storm": quiet - began, "settle": settled - quiet}
        return report

    async def _storm(self, began: float) -> None:
        options, over = self._options, asyncio.Event()
        async with asyncio.TaskGroup() as storm:
            for number in range(options.writers):
                seed = options.seed * 1000 + number
                storm.create_task(Writer(self._stage.dsn, self._keys, self._journal, self._pace, seed).run())
            await self._flowing()
            if options.drops_every_second:
                storm.create_task(self._injector.drop_every_second(over))
            start = time.monotonic()
            async with asyncio.TaskGroup() as faults:
                for fault in schedule(options):
                    await asyncio.sleep(max(start + fault.at - time.monotonic(), 0))
                    faults.create_task(self._injector.run(fault))
                    self._say(f"{time.monotonic() - began:5.0f} s  {fault.kind} {fault.seconds or ''}")
            deadline = time.monotonic() + 3 * options.seconds
            await asyncio.sleep(max(start + options.seconds - time.monotonic(), 0))
            while not self._pace.done and time.monotonic() < deadline:
                await asyncio.sleep(0.1)
            over.set()
            self._pace.over.set()
        await end_prepared(self._stage.dsn)

    async def _flowing(self) -> None:
        """The first faults meet a relay that works; what happens before is another test's business."""
        deadline = time.monotonic() + 30
        while not self._arrivals.seen and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def _settle(self) -> list[Entry]:
        """Wait until the tail has seen every row of the table, or the time is over: the verdict names the rest."""
        committed = await table(self._stage.dsn)
        missing = {entry.id for entry in committed}
        deadline = time.monotonic() + self._options.settle
        while missing := missing - self._arrivals.seen:
            if time.monotonic() > deadline:
                self._problems.append(
                    f"{len(missing)} events had not arrived {self._options.settle:g} s after the last fault"
                )
                break
            await asyncio.sleep(0.1)
        return committed

    async def _verdict(self, committed: list[Entry]) -> Findings:
        comparison = Comparison(committed, self._journal.rolled_back)
        broker: Any = self._stage.broker
        if self._options.broker == "jetstream":
            await verifier.read_jetstream(broker.url, comparison.take)
        else:
            await asyncio.to_thread(verifier.read_kafka, broker.bootstrap, comparison.take)
        return comparison.done()

    async def _tail(self) -> None:
        broker: Any = self._stage.broker
        with contextlib.suppress(asyncio.CancelledError):
            if self._options.broker == "jetstream":
                await tail_jetstream(broker.url, self._arrivals)
            else:
                await tail_kafka(broker.bootstrap, self._arrivals)

    async def _tell(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(10)
            written, seen = len(self._journal.committed), len(self._arrivals.seen)
            self._say(f"{time.monotonic() - began:5.0f} s  committed {written:,}  arrived {seen:,}")
