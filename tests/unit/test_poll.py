"""The poll source's rounds: persisted before the first row, closed after the last acknowledgement, S := E in between.

The queries run on real servers (integration/test_polling.py); here a table is a list of pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.checkpoint import EMPTY, Sample, Snapshot
from relay.config import Outbox
from relay.event import Batch
from relay.lsn import LSN
from relay.observer import danger
from relay.outbox import mappings
from relay.progress import Progress
from relay.source.poll import Gap, PollSource

GAP = Gap(since="3:3:", until="10:12:10", until_lsn="1/A0")
TABLES = mappings([Outbox(table=f"public.t{n}") for n in range(4)])
SINCE = Snapshot(7, 7)


@given(st.integers(0, 9), st.none() | st.integers(-(2**63), 2**63 - 1), st.none() | st.lists(st.integers(3, 2**63)))
def test_a_round_survives_json(table: int, seq: int | None, xids: list[int] | None) -> None:
    gap = Gap(GAP.since, GAP.until, GAP.until_lsn, table, seq, None if xids is None else tuple(xids))
    assert Gap.of(orjson.loads(orjson.dumps(gap.to_json()))) == gap


def test_a_round_knows_its_sample() -> None:
    assert GAP.sample == Sample(Snapshot(10, 12, frozenset({10})), LSN(0x1_0000_00A0))
    assert Gap.between(EMPTY, GAP.sample) == GAP


class Pages(PollSource):
    """Tables with the given pages per round (rows each); journal is what happened, in order. It is its own Rounds."""

    def __init__(
        self, *rounds: dict[int, list[int]], resumed: Gap | None = None, single: bool = False, present: Any = TABLES
    ) -> None:
        self.journal: list[Any] = []
        super().__init__(
            None,  # type: ignore[arg-type]  # no page is read from a server here
            present,
            lambda binding: pytest.fail("nothing is routed"),
            self,
            Progress(),
            since=SINCE,
            resumed=resumed,
            stamp=lambda round_: b"",
            interval=3600,
            single=single,
        )
        self.rounds = list(rounds)
        self.samples = 0
        self._tables = [_FakeTable(self, table) for table in self._tables]  # type: ignore[misc]

    async def sample(self) -> Sample:
        self.samples += 1
        self.journal.append("sample")
        return Sample(Snapshot(100 * self.samples, 100 * self.samples), LSN(self.samples))

    async def begin(self, gap: Gap) -> None:
        self.journal.append(("begin", gap.since, gap.until))

    async def drained(self) -> None:
        self.journal.append("drained")

    async def done(self, gap: Gap) -> None:
        self.rounds.pop(0)
        self.journal.append(("done", gap.until))

    async def run(self, at: dict[int, Any] | None = None) -> list[Batch]:
        """All batches; before the n-th is asked for, `at[n]` is done."""
        batches = []
        async with asyncio.timeout(10):
            async for batch in self.batches():
                batches.append(batch)
                self.journal.append("batch")
                if at and len(batches) in at:
                    at[len(batches)]()
        return batches


class _Result:
    def __init__(self, rows: int) -> None:
        self.ntuples = rows


class _FakeTable:
    def __init__(self, source: Pages, table: Any) -> None:
        self.source, self.mapping = source, table.mapping

    async def results(self, session: Any, gap: Gap, after: int | None) -> AsyncIterator[_Result]:
        self.source.journal.append((self.mapping.table, after))
        for rows in self.source.rounds[0].get(self.mapping.ordinal, []) if self.source.rounds else []:
            yield _Result(rows)

    def events(self, result: _Result, rows: range, stamp: bytes) -> tuple[list[Any], list[Any], int, int]:
        return [], [], 0, 99


READ = [(f"public.t{n}", None) for n in range(4)]


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
async def test_a_round_is_persisted_before_its_first_row_and_closed_after_the_last_acknowledgement() -> None:
    source = Pages({0: [3], 2: [5, 1]})
    batches = await source.run({3: source.finish})
    assert [batch.end_lsn for batch in batches] == [3, 8, 9]
    first = ["sample", READ[0], ("begin", "7:7:", "100:100:"), "batch", READ[1], READ[2], "batch", "batch", READ[3]]
    closed = ["drained", ("done", "100:100:")]
    # `finish` was called while the round ran: one more, with a snapshot of its own, which finds nothing to persist.
    assert source.journal == [*first, *closed, "sample", *READ]
    assert source.since.snapshot == Snapshot(200, 200)


@pytest.mark.guarantee("G5")
async def test_finish_means_one_more_round_with_a_snapshot_taken_afterwards() -> None:
    source = Pages({0: [1]}, {1: [1]})
    task = asyncio.ensure_future(source.run())
    await asyncio.wait_for(source.caught_up.wait(), 10)
    assert source.samples == 1 and not task.done()
    source.finish()
    assert len(await task) == 2
    assert source.samples == 2
    assert ("begin", "100:100:", "200:200:") in source.journal  # S := E
    assert source.since == Sample(Snapshot(200, 200), LSN(2))


@pytest.mark.guarantee("G7")
async def test_an_empty_round_persists_nothing_and_is_repeated_when_woken() -> None:
    source = Pages()
    task = asyncio.ensure_future(source.run())
    async with asyncio.timeout(10):
        for number in range(1, 4):
            while source.samples < number:
                await asyncio.sleep(0)
            while source._gap is not None or not source.caught_up.is_set():
                await asyncio.sleep(0)
            await asyncio.sleep(0)
            source.wake()
        source.finish()
        await task
    assert not [entry for entry in source.journal if entry == "drained" or entry[0] in ("begin", "done")]


@pytest.mark.guarantee("G5")
@given(st.sets(st.integers(0, 3), min_size=1), st.data())
async def test_a_resumed_round_reads_what_is_left_whichever_tables_take_part(
    present: set[int], data: st.DataObject
) -> None:
    """The place is kept by the table's ordinal; tables that cannot be recovered are not in the list."""
    ordinal = data.draw(st.sampled_from(sorted(present)))
    resumed = Gap(GAP.since, GAP.until, GAP.until_lsn, ordinal, 57)
    source = Pages({}, resumed=resumed, single=True, present=[TABLES[n] for n in sorted(present)])
    assert source.persisted and source.reached(LSN(0)) == resumed
    await source.run()
    asked = [(f"public.t{n}", 57 if n == ordinal else None) for n in sorted(present) if n >= ordinal]
    # Even an empty rest is closed: the round was begun.
    assert source.journal == [*asked, "drained", ("done", GAP.until)]
    assert source.since == GAP.sample


async def test_after_a_resumed_round_the_next_one_begins_where_it_ended() -> None:
    source = Pages({0: [1]}, {0: [1]}, resumed=GAP)
    source.finish()
    await source.run()
    assert source.samples == 1  # a resumed round is never the last one
    assert ("begin", GAP.until, "100:100:") in source.journal


@pytest.mark.guarantee("G1")
async def test_the_place_moves_only_with_acknowledgements() -> None:
    source = Pages({n: [10] for n in range(4)}, single=True)
    assert source.reached(LSN(0)) is None
    places: list[Gap | None] = []

    def look() -> None:
        places.extend(source.reached(LSN(acknowledged)) for acknowledged in (0, 9, 10, 29, 29, 40))

    await source.run({4: look})
    assert [(gap.table, gap.seq) for gap in places if gap is not None] == [
        (0, None),
        (0, None),
        (0, 99),
        (1, 99),
        (1, 99),
        (3, 99),
    ]
    assert source.reached(LSN(40)) is None
    await source.confirm(LSN(40))  # a table has nothing to confirm


# --- the observer's warning


def slot(**changes: Any) -> dict[str, Any]:
    return {"name": "s", "wal_status": "reserved", "safe_wal_size": None, "retained_bytes": 10, **changes}


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({}, False),
        ({"wal_status": "extended", "safe_wal_size": None}, False),
        ({"wal_status": "unreserved", "safe_wal_size": -5}, True),
        ({"wal_status": "lost", "safe_wal_size": None, "retained_bytes": None}, True),
        ({"safe_wal_size": 100, "retained_bytes": 100}, False),
        ({"safe_wal_size": 19, "retained_bytes": 81}, True),
        ({"safe_wal_size": 21, "retained_bytes": 79}, False),
        ({"wal_status": None, "retained_bytes": None}, False),  # there is none
    ],
)
def test_a_slot_in_danger_is_warned_of(changes: dict[str, Any], warns: bool) -> None:
    assert bool(danger(slot(**changes))) == warns
