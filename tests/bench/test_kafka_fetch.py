"""Kafka's answers to a fetch, wherever the socket cuts them: which offsets arrived, and nothing else."""

from __future__ import annotations

import socket
import threading
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay.bench.kafka_fetch import Leader, Span, fetched, request, session_of, spans_of

TOPIC = b"orders.created"


def _batch(first: int, events: int, body: bytes = b"compressed, whatever it holds") -> bytes:
    inside = pack(">ibIhi", 0, 2, 0, 3, events - 1) + body
    return pack(">qi", first, len(inside)) + inside


def _partition(number: int, records: bytes | None, error: int = 0, aborted: int = 0) -> bytes:
    head = pack(">ihqqqi", number, error, 9, 9, 0, aborted or -1) + b"\1" * (16 * aborted)
    return head + pack(">ii", -1, -1 if records is None else len(records)) + (records or b"")


def _answer(*partitions: bytes, error: int = 0, session: int = 0) -> bytes:
    head = pack(">iihi", 0, 0, error, session) + pack(f">ih{len(TOPIC)}s", 1, len(TOPIC), TOPIC)
    return head + pack(">i", len(partitions)) + b"".join(partitions)


def test_offsets_of_every_partition() -> None:
    full = _batch(5, 3) + _batch(8, 1) + _batch(9, 4)[:-1]  # the last one is cut: it comes again
    answer = _answer(
        _partition(0, full, aborted=2), _partition(1, None), _partition(2, b""), _partition(3, _batch(0, 2))
    )
    assert list(spans_of(answer)) == [Span(0, 5, 8), Span(0, 8, 9), Span(3, 0, 2)]


@given(st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 1000), st.binary(max_size=50)), max_size=5), st.data())
def test_a_cut_answer_never_has_more_than_the_whole(batches: list[tuple[int, int, bytes]], data: st.DataObject) -> None:
    records = b"".join(_batch(*each) for each in batches)
    whole = list(spans_of(_answer(_partition(7, records))))
    assert whole == [Span(7, first, first + events) for first, events, _ in batches]
    cut = records[: data.draw(st.integers(0, len(records)))]
    found = list(spans_of(_answer(_partition(7, cut))))
    assert found == whole[: len(found)]


def test_what_a_broker_refuses_ends_the_run_but_not_a_topic_that_is_new() -> None:
    assert list(spans_of(_answer(_partition(0, None, error=3)))) == []
    with pytest.raises(SystemExit, match="error 29"):
        list(spans_of(_answer(_partition(0, None, error=29))))
    with pytest.raises(SystemExit, match="error 35"):
        session_of(_answer(error=35))


def test_a_leader_is_asked_for_what_comes_next() -> None:
    """All partitions, until the broker keeps a session; then what has changed; all when it has forgotten us."""
    asked: list[bytes] = []
    answers = [
        _answer(_partition(0, _batch(0, 3))),
        _answer(_partition(0, None), session=7),
        _answer(_partition(1, _batch(0, 1)), session=7),
        _answer(session=7),
        _answer(error=70),
        _answer(_partition(0, _batch(3, 1)), session=8),
    ]

    def broker(server: socket.socket) -> None:
        client, _ = server.accept()
        with client:
            for answer in answers:
                size = int.from_bytes(client.recv(4, socket.MSG_WAITALL), "big")
                asked.append(client.recv(size, socket.MSG_WAITALL))
                framed = pack(">i", len(answer)) + answer
                for at in range(0, len(framed), 5):  # in pieces
                    client.sendall(framed[at : at + 5])
            client.recv(4, socket.MSG_WAITALL)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=broker, args=(server,))
        thread.start()
        leader = Leader(server.getsockname(), TOPIC.decode(), [0, 1])
        leader.ask()
        spans: list[Span] = []
        while len(spans) < 3:
            spans += [span for _, span in fetched([leader], 10.0)]
        leader.close()
        thread.join()
    assert spans == [Span(0, 0, 3), Span(1, 0, 1), Span(0, 3, 4)]
    assert asked == [
        request(TOPIC, {0: 0, 1: 0}),
        request(TOPIC, {0: 3, 1: 0}),
        request(TOPIC, {}, 7, 1),
        request(TOPIC, {1: 1}, 7, 2),
        request(TOPIC, {}, 7, 3),
        request(TOPIC, {0: 3, 1: 1}),
    ]
