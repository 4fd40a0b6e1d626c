"""The pgoutput decoder: right, or a ProtocolError. Real servers' bytes are in integration/test_pgoutput_golden.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.errors import ProtocolError
from relay.source.decoder import sent_at, unix_time
from relay.source.pgoutput import (
    Begin,
    Column,
    Commit,
    Relation,
    decode_begin,
    decode_commit,
    decode_insert,
    decode_relation,
)
from tests.fakes import begin, commit, insert, keepalive, relation, xlog_data

LSNS = st.integers(0, 2**64 - 1)
OIDS = st.integers(0, 2**32 - 1)
NAMES = st.text(st.characters(exclude_characters="\0", codec="utf-8"), max_size=20)
COLUMNS = st.lists(st.tuples(NAMES, OIDS), max_size=8)
CELLS = st.lists(st.none() | st.binary(max_size=40), min_size=1, max_size=8)
HEAD = st.binary(max_size=30)  # what stands before the message in the buffer


@given(HEAD, LSNS, OIDS, st.integers(-(2**62), 2**62))
def test_begin_round_trip(head: bytes, lsn: int, xid: int, microseconds: int) -> None:
    assert decode_begin(head + begin(lsn, xid, microseconds), len(head)) == Begin(lsn, unix_time(microseconds), xid)


def test_times_count_from_the_year_2000() -> None:
    assert unix_time(0) == 946_684_800  # 2000-01-01 00:00:00 UTC
    assert unix_time(1_500_000) == 946_684_801.5


@given(LSNS, LSNS, st.integers(-(2**62), 2**62), st.binary(max_size=30))
def test_every_message_says_when_it_was_sent(lsn: int, end: int, microseconds: int, rest: bytes) -> None:
    assert sent_at(xlog_data(rest, lsn, microseconds)) == unix_time(microseconds)
    assert sent_at(keepalive(end, reply=True, sent=microseconds)) == unix_time(microseconds)


@given(HEAD, LSNS, LSNS)
def test_commit_round_trip(head: bytes, lsn: int, end: int) -> None:
    assert decode_commit(head + commit(lsn, end), len(head)) == Commit(lsn, end)


@given(HEAD, OIDS, NAMES, NAMES, COLUMNS)
def test_relation_round_trip(head: bytes, oid: int, schema: str, table: str, columns: list[tuple[str, int]]) -> None:
    decoded = decode_relation(head + relation(oid, schema, table, columns), len(head))
    # An empty schema is how the protocol spells pg_catalog.
    assert decoded == Relation(oid, schema or "pg_catalog", table, tuple(Column(*column) for column in columns))


@given(HEAD, OIDS, CELLS, st.data())
def test_insert_round_trip(head: bytes, oid: int, cells: list[bytes | None], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(cells))))
    wanted = data.draw(st.lists(st.booleans(), min_size=len(cells), max_size=len(cells)))
    slots = [place if want else -1 for place, want in zip(order, wanted, strict=True)]
    buffer = head + insert(oid, cells)
    expected: list[bytes | None] = [None] * len(cells)
    for slot, cell in zip(slots, cells, strict=True):
        if slot >= 0:
            expected[slot] = cell
    assert decode_insert(buffer, len(head), slots, len(cells)) == expected


def decode_three(data: bytes, start: int) -> object:
    return decode_insert(data, start, (0, 1, 2), 3)


MESSAGES: list[tuple[bytes, Callable[[bytes, int], object]]] = [
    (begin(0x16B374D848, 739), decode_begin),
    (commit(0x16B374D848, 0x16B374D880), decode_commit),
    (relation(16385, "public", "outbox_events", [("id", 2950), ("payload", 3802), ("ö", 25)]), decode_relation),
    (relation(16385, "public", "empty", []), decode_relation),
    (insert(16385, [b"abc", None, b"x" * 300]), decode_three),
    (insert(16385, [None, None, None]), decode_three),
    (insert(16385, [b"", b"", b""]), decode_three),
]


@pytest.mark.parametrize(("message", "decode"), MESSAGES)
@pytest.mark.parametrize("head", [b"", b"w" * 25])
def test_every_truncation_and_every_surplus_is_refused(
    head: bytes, message: bytes, decode: Callable[[bytes, int], object]
) -> None:
    decode(head + message, len(head))
    for length in range(len(message)):
        with pytest.raises(ProtocolError):
            decode(head + message[:length], len(head))
    with pytest.raises(ProtocolError):
        decode(head + message + b"\0", len(head))


@settings(max_examples=300)
@given(st.sampled_from(MESSAGES), st.data())
def test_corruption_is_refused_or_read_as_what_it_says(
    case: tuple[bytes, Callable[[bytes, int], object]], data: st.DataObject
) -> None:
    message, decode = case
    buffer = bytearray(message)
    for _ in range(data.draw(st.integers(1, 4))):
        buffer[data.draw(st.integers(0, len(buffer) - 1))] = data.draw(st.integers(0, 255))
    with suppress(ProtocolError):
        decode(bytes(buffer), 0)


@given(st.binary(max_size=200), st.sampled_from([decode_begin, decode_commit, decode_relation, decode_three]))
def test_noise_is_refused_or_read_as_what_it_says(noise: bytes, decode: Callable[[bytes, int], object]) -> None:
    with suppress(ProtocolError):
        decode(noise, 0)


def test_an_insert_must_have_the_columns_that_its_relation_announced() -> None:
    with pytest.raises(ProtocolError, match="announce 2 columns"):
        decode_insert(insert(1, [b"a", b"b", b"c"]), 0, (0, 1), 2)


@pytest.mark.parametrize("kind", [b"u", b"b", b"?"])
def test_values_of_another_kind_are_refused(kind: bytes) -> None:
    """u (unchanged TOAST) is for updates only, b (binary) was not asked for."""
    message = insert(1, [None]).replace(b"n", kind)
    with pytest.raises(ProtocolError, match="unknown kind"):
        decode_insert(message + b"\0\0\0\0", 0, (0,), 1)
