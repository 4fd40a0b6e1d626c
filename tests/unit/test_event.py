"""Event, Batch and header names: rendering, sharing, counting."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from relay.event import Batch, Event, HeaderNames, Transaction
from relay.lsn import LSN

ORIGIN = Transaction(700, 100, 0.0, b"")
NAMES = st.lists(st.text(st.characters(min_codepoint=33, max_codepoint=126, exclude_characters=":")), unique=True)


def event(names: tuple[str, ...], values: tuple[bytes, ...]) -> Event:
    return Event(b"id", "topic", None, HeaderNames.of(names), values, None, "public.o", ORIGIN, 0)


@given(NAMES, st.data())
def test_a_block_renders_every_name_with_its_value(names: list[str], data: st.DataObject) -> None:
    """Names with % in them, values with % in them: what comes out is line by line what went in."""
    values = tuple(data.draw(st.binary(max_size=10)) for _ in names)
    block = HeaderNames(tuple(names)).block % values
    lines = [name.encode() + b": " + value + b"\r\n" for name, value in zip(names, values, strict=True)]
    assert block == b"".join(lines)
    assert event(tuple(names), values).headers() == list(zip(names, values, strict=True))


def test_names_are_shared() -> None:
    assert HeaderNames.of(("a", "b")) is HeaderNames.of(("a", "b"))
    assert HeaderNames.of(("a", "b")) is not HeaderNames.of(("b", "a"))


def test_shared_names_are_bounded() -> None:
    """Rows choose their headers' names: memory must not depend on how many different ones there are."""
    for number in range(5000):
        HeaderNames.of((f"x-{number}",))
    assert HeaderNames.of.cache_info().currsize <= 1024


def test_a_batch_remembers_how_many_events_it_had() -> None:
    batch = Batch([event((), ()), event((), ())], LSN(5))
    del batch.events[0]
    assert batch.count == 2
    assert (batch.end_lsn, batch.rejected, batch.size_bytes) == (5, [], 0)
    assert Batch([], LSN(5)).rejected is not batch.rejected
