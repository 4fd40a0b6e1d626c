"""Recovery: the gap as it is persisted, and the order in which its tables are read. The rest runs on real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.checkpoint import Sample, Snapshot
from relay.config import Outbox
from relay.event import Batch
from relay.lsn import LSN
from relay.outbox import Mapping, mappings
from relay.progress import Progress
from relay.recovery import Gap
from relay.source.poll import GapSource

GAP = Gap(id="abc", since="3:3:", until="10:12:10", until_lsn="1/A0", start="1/90")


@given(st.integers(0, 9), st.none() | st.integers(-(2**63), 2**63 - 1))
def test_a_gap_survives_json(table: int, seq: int | None) -> None:
    gap = Gap(**{**GAP.to_json(), "table": table, "seq": seq})
    assert Gap(**orjson.loads(orjson.dumps(gap.to_json()))) == gap


def test_a_gap_knows_its_sample_and_its_place() -> None:
    assert GAP.sample == Sample(Snapshot(10, 12, frozenset({10})), LSN(0x1_0000_00A0))
    assert GAP.after == (0, -(2**63))  # before any seq
    assert Gap(**{**GAP.to_json(), "table": 2, "seq": 0}).after == (2, 0)


TABLES = mappings([Outbox(table=f"public.t{n}") for n in range(4)])


class Pages(GapSource):
    """A gap whose tables have one page each; notes what was asked for."""

    def __init__(self, tables: list[Mapping], after: tuple[int, int]) -> None:
        nobody = Snapshot(3, 3)
        super().__init__(
            None,  # type: ignore[arg-type]  # no page is read from a server here
            tables,
            lambda binding: pytest.fail("nothing is routed"),
            since=nobody,
            until=nobody,
            after=after,
            stamp=b"",
            progress=Progress(),
        )
        self.asked: list[tuple[str, int | None]] = []

    async def _table(self, mapping: Mapping, after: int | None) -> AsyncIterator[Batch]:
        self.asked.append((mapping.table, after))
        self._handed += 10
        self._places.append((self._handed, (mapping.ordinal, 99)))
        yield Batch([], LSN(self._handed))


@pytest.mark.guarantee("G5")
@given(st.sets(st.integers(0, 3), min_size=1), st.data())
async def test_a_resumed_gap_reads_what_is_left_whichever_tables_take_part(
    present: set[int], data: st.DataObject
) -> None:
    """The place is kept by the table's ordinal; tables that cannot be recovered are not in the list."""
    tables = [TABLES[ordinal] for ordinal in sorted(present)]
    ordinal = data.draw(st.sampled_from(sorted(present)))
    source = Pages(tables, (ordinal, 57))
    batches = [batch async for batch in source.batches()]
    assert source.asked == [(f"public.t{n}", 57 if n == ordinal else None) for n in sorted(present) if n >= ordinal]
    assert len(batches) == len(source.asked)


@pytest.mark.guarantee("G1")
async def test_the_place_moves_only_with_acknowledgements() -> None:
    source = Pages(list(TABLES), (0, -1))
    assert source.reached(LSN(0)) == (0, -1)
    async for _ in source.batches():
        pass
    assert source.reached(LSN(9)) == (0, -1)
    assert source.reached(LSN(10)) == (0, 99)
    assert source.reached(LSN(29)) == (1, 99)
    assert source.reached(LSN(29)) == (1, 99)
    assert source.reached(LSN(40)) == (3, 99)
    await source.confirm(LSN(40))  # a table has nothing to confirm
