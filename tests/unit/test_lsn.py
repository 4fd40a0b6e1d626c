"""LSNs are integers that print as Postgres prints them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.lsn import LSN

lsns = st.integers(0, 2**64 - 1).map(LSN)


@given(lsns)
def test_what_is_printed_is_parsed_back(lsn: LSN) -> None:
    assert LSN.parse(str(lsn)) == lsn
    assert LSN.parse(str(lsn).lower()) == lsn


@given(lsns)
def test_the_padded_form_of_newer_servers_is_the_same_lsn(lsn: LSN) -> None:
    assert LSN.parse(f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:08X}") == lsn


@given(lsns, lsns)
def test_order_is_that_of_integers(one: LSN, other: LSN) -> None:
    assert (one < other) == (int(one) < int(other))


def test_text_order_would_be_wrong() -> None:
    before, after = LSN.parse("0/FFFFFFF8"), LSN.parse("1/8")
    assert before < after
    assert LSN.parse("9/0") < LSN.parse("10/0")
    assert str(LSN.parse("9/0")) > str(LSN.parse("10/0"))


def test_it_prints_as_postgres_prints_it() -> None:
    lsn = LSN(0x16B3748)
    assert str(lsn) == f"{lsn}" == "0/16B3748"
    assert repr(lsn) == "LSN(0/16B3748)"


@pytest.mark.parametrize(
    "text",
    ["", "/", "0", "0/", "/0", "0/0/0", "0-0", "0/G", "x/0", "+1/0", "-1/0", " 1/0", "1/0 ", "1_0/0", "0x1/0", "0\n/0"],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN"):
        LSN.parse(text)


@pytest.mark.parametrize("text", ["123456789/0", "0/123456789", "1 2/0", "0/1 2", "\u0663/0", "16/B374D848;"])
def test_lengths_spaces_and_foreign_digits_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not an LSN"):
        LSN.parse(text)


@given(st.text(max_size=20))
def test_no_text_is_misread(text: str) -> None:
    try:
        lsn = LSN.parse(text)
    except ValueError:
        return
    assert LSN.parse(str(lsn)) == lsn
    assert 0 <= lsn < 2**64
