"""Subjects: what can be published to, and which pattern covers which."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.sink.subjects import MAX_BYTES, covers, fault


@pytest.mark.parametrize(
    "subject", ["a", "events.order.created", "ereignis.größe", "$KV.bucket.key", "a.b-c_d/e", "x*y.>z"]
)
def test_subjects_that_can_be_published_to(subject: str) -> None:
    assert fault(subject) is None


@pytest.mark.parametrize(
    ("subject", "why"),
    [
        ("", "empty"),
        ("a b", "space"),
        ("a\r\nPUB x 0", "space or control"),
        ("a\tb", "space or control"),
        ("a\0", "space or control"),
        (".a", "empty token"),
        ("a.", "empty token"),
        ("a..b", "empty token"),
        ("a.*", "wildcard"),
        ("a.>", "wildcard"),
        ("$JS.API.STREAM.DELETE.X", "reserved"),
        ("$SYS.REQ.SERVER.PING", "reserved"),
        ("_INBOX.x", "reserved"),
        ("a" * (MAX_BYTES + 1), "bytes"),
        ("ä" * (MAX_BYTES // 2 + 1), "bytes"),
        ("\ud800", "Unicode"),
    ],
)
def test_subjects_that_cannot(subject: str, why: str) -> None:
    assert why in (fault(subject) or "")


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "a.b", True),
        ("a.*", "a.b.c", False),
        ("a.*", "a", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        (">", "a", True),
        (">", ">", True),
        ("*", ">", False),
        ("a.>", "a.>", True),
        ("a.>", "a.*", True),
        ("a.*", "a.>", False),
        ("a.*.c", "a.*.c", True),
        ("a.b.c", "a.*.c", False),
        ("*.*", "a.>", False),
    ],
)
def test_covers(pattern: str, subject: str, expected: bool) -> None:
    assert covers(pattern, subject) is expected


_tokens = st.lists(st.sampled_from(["a", "b", "c"]), min_size=1, max_size=4)


@given(st.lists(st.sampled_from(["a", "b", "*"]), min_size=1, max_size=3), st.booleans(), _tokens)
def test_covers_agrees_with_a_regular_expression(pattern: list[str], rest: bool, subject: list[str]) -> None:
    expression = r"\.".join("[^.]+" if token == "*" else token for token in pattern) + (r"\..+" if rest else "")
    expected = re.fullmatch(expression, ".".join(subject)) is not None
    assert covers(".".join(pattern) + (".>" if rest else ""), ".".join(subject)) is expected
