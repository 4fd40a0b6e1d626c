"""What the Kafka sinks remember without a broker: first contacts with partitions, blocked keys, marks."""

from __future__ import annotations

from relay.sink.kafka_blocking import Blocked, behind, block
from relay.sink.kafka_contacts import Contact, Contacts
from relay.sink.kafka_marks import Marks
from tests.sinks import make_event


def contacts() -> Contacts:
    return Contacts(lambda key: key[0])


def test_the_first_event_to_a_partition_travels_alone() -> None:
    met = contacts()
    assert met.meet("t", b"\0", 2) == ("", Contact("t", 0))
    assert met.meet("t", b"\2", 2) == ("contact", None)  # the same partition, and nothing acknowledged there yet
    assert met.meet("t", b"\1", 2) == ("", Contact("t", 1))
    met.establish(Contact("t", 0), 2)
    assert met.meet("t", b"\2", 2) == ("", None)
    assert met.meet("t", b"\1", 2) == ("contact", None)
    assert met.ready == {"t": {b"\2"}}
    met.establish(Contact("t", 1), 2)
    assert met.ready == {"t": None}


def test_events_without_a_key_go_where_nobody_was_yet() -> None:
    met = contacts()
    assert [met.meet("t", None, 2) for _ in range(3)] == [
        ("", Contact("t", 0)),
        ("", Contact("t", 1)),
        ("contact", None),
    ]


def test_a_contact_that_was_not_sent_leaves_its_place_to_the_next() -> None:
    met = contacts()
    met.meet("t", b"\0", 1)
    met.forget(Contact("t", 0))
    assert met.meet("t", b"\1", 1) == ("", Contact("t", 0))


def test_a_rejected_event_blocks_its_key_until_it_comes_again() -> None:
    blocked: Blocked = {}
    culprit, same, other = (make_event(seq, topic="t", key=key) for seq, key in ((1, b"a"), (2, b"a"), (3, b"b")))
    block(blocked, culprit)
    block(blocked, same)  # it is behind the first
    assert culprit.id.decode() in (behind(blocked, same) or "")
    assert behind(blocked, other) is None
    assert behind(blocked, other._replace(topic="u", key=b"a")) is None
    assert behind(blocked, culprit) is None
    assert behind(blocked, same) is None


def test_an_event_without_a_key_neither_blocks_nor_waits() -> None:
    blocked: Blocked = {}
    event = make_event(1, topic="t", key=None)
    block(blocked, event)
    assert not blocked
    assert behind({("t", b"a"): b"x"}, event) is None


def test_no_mark_passes_an_event_that_may_still_come() -> None:
    marks = Marks({"t/0": 5})
    marks.held = {b"a": ("t/0", 5), b"b": ("t/0", 6)}
    marks.reach("t/0", 9)
    assert marks.take() == {"t/0": 5}
    assert marks.is_held(b"a")
    assert not marks.is_held(b"a")
    assert marks.take() == {"t/0": 6}
    marks.settle()
    assert marks.take() == {"t/0": 9}
    assert marks.take() == {}
    assert marks.duplicates == 1


def test_a_mark_never_goes_back() -> None:
    marks = Marks({"t/0": 5})
    marks.reach("t/0", 3)
    assert marks.known == marks.take() == {"t/0": 5}


def test_the_beginning_of_a_new_destination_is_told() -> None:
    marks = Marks({"t/0": 5})
    marks.first_seen({"u/0": 7})
    assert marks.known == {"t/0": 5, "u/0": 7}
    assert marks.begins == marks.take() == {"u/0": 7}
