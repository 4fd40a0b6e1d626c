"""The table contract: columns by name, then by position; from the WAL and from a SELECT alike."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.config import Columns, Outbox
from relay.errors import ContractError
from relay.outbox import AGGREGATE_ID, FIELDS, ID, PARTITION_KEY, PAYLOAD, SEQ, ClaimColumns, Mapping, mappings

NAMED = [field for field in FIELDS if field != "stream"]  # "stream" is not mapped unless the config names a column


def mapping(outbox: Outbox | None = None, *, several: bool = False) -> Mapping:
    return Mapping.of(outbox or Outbox(), 0, several=several)


@given(st.permutations([*NAMED, "xid", "published_at", "extra"]))
def test_columns_are_found_wherever_they_stand(order: list[str]) -> None:
    binding = mapping().bind([(name, 1000 + number) for number, name in enumerate(order)])
    for number, name in enumerate(order):
        if name in NAMED:
            place = FIELDS.index(name)
            assert binding.slots[number] == place
            assert binding.types[place] == 1000 + number
        else:
            assert binding.slots[number] == -1
    assert binding.width == len(FIELDS)
    assert binding.copies == ()


def test_a_missing_column_is_named_together_with_the_ones_there_are() -> None:
    columns = [(name, 25) for name in [*NAMED, "xid"] if name not in ("payload", "topic")]
    with pytest.raises(ContractError, match=r"no column topic, payload \(it has seq, id") as caught:
        mapping().bind(columns)
    assert "outbox.columns" in caught.value.hint


def test_a_part_that_the_table_does_not_have() -> None:
    outbox = Outbox(columns=Columns(topic="", partition_key="", headers="", created_at=""))
    binding = mapping(outbox).bind(
        [(name, 25) for name in ("seq", "id", "aggregate_type", "aggregate_id", "event_type", "payload", "xid")]
    )
    assert binding.types[PARTITION_KEY] == 0
    assert binding.types[PAYLOAD] == 25


def test_one_column_may_play_several_parts() -> None:
    outbox = Outbox(
        columns=Columns(aggregate_id="id", partition_key="id"), header_columns={"x-tenant": "tenant", "x-id": "id"}
    )
    columns = [(name, 25) for name in [*NAMED, "xid", "tenant"] if name not in ("aggregate_id", "partition_key")]
    binding = mapping(outbox).bind(columns)
    first_header = len(FIELDS)
    assert set(binding.copies) == {(ID, AGGREGATE_ID), (ID, PARTITION_KEY), (ID, first_header + 1)}
    assert binding.width == len(FIELDS) + 2
    assert binding.slots[[name for name, _ in columns].index("tenant")] == first_header


def test_a_table_that_was_not_adopted_is_read_without_seq_and_xid() -> None:
    columns = [(name, 25) for name in NAMED if name != "seq"]
    binding = mapping().bind(columns)
    assert binding.types[SEQ] == 0
    assert not binding.mapping.recoverable
    assert mapping().recoverable
    # Who names the column expects it.
    with pytest.raises(ContractError, match="no column number"):
        mapping(Outbox(columns=Columns(seq="number"))).bind(columns)


def test_tables_are_numbered_as_the_config_lists_them() -> None:
    first, second = mappings([Outbox(table="public.a"), Outbox(table="shop.b")])
    assert (first.table, first.ordinal, first.several) == ("public.a", 0, True)
    assert (second.table, second.ordinal) == ("shop.b", 1)
    assert not mappings([Outbox()])[0].several


DEFAULT_TABLE = [*NAMED, "xid", "published_at", "attempts", "next_attempt_at", "last_error"]


def test_the_default_table_is_claimed_without_a_word() -> None:
    found = ClaimColumns.of(Outbox(), DEFAULT_TABLE)
    assert (found.unpublished, found.write_back) == ({"published_at": "NULL"}, {"published_at": "now()"})
    assert found.written == ("published_at", "attempts", "next_attempt_at", "last_error")
    bare = ClaimColumns.of(Outbox(), [*NAMED, "published_at"])  # what nobody named may be missing
    assert (bare.attempts, bare.next_attempt, bare.last_error) == ("", "", "")


@pytest.mark.parametrize(
    ("block", "says"),
    [
        ({"unpublished": {"state": "new"}}, "cannot be claimed"),
        ({"unpublished": {"state": "new"}, "write_back": {"state": "new"}}, "cannot be claimed"),
        ({"unpublished": {"state": "new"}, "write_back": {"state": "sent"}}, "has no column state"),
        ({"claim": {"attempts": "tries"}}, "has no column tries"),
        ({"claim": {"failed": {"last_error": "{error}"}}}, "tried for ever"),
    ],
)
def test_what_cannot_be_claimed_is_said(block: dict[str, Any], says: str) -> None:
    with pytest.raises(ContractError, match=says):
        ClaimColumns.of(Outbox.model_validate(block), DEFAULT_TABLE)
