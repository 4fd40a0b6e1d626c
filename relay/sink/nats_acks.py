"""Acknowledgements as JetStream sends them, pure: finding them in the incoming bytes, reading them, judging errors.

`AckParser` stands in front of nats-py's protocol parser, because the way through it (regex per frame, a Msg, a queue, a
task) costs more per event than everything else the relay does. It takes the leading run of our own acks out of what was
read and hands everything else on, byte for byte. It must never see an ack twice, drop one, or touch foreign bytes.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

import orjson

from relay.errors import ProtocolError, RelayError, SetupError, SinkUnavailable

AWAITING_CONTROL_LINE = 1  # nats.protocol.parser's state between two frames

# Error codes of a PubAck. What is in no class is unknown: the relay stops rather than guesses.
TRANSIENT = frozenset({10002, 10008, 10009, 10023, 10047, 10077, 10118, 10158, 10163, 10167})
_FULL = {
    10023: "the server has no room left: see its disk, max_file_store and max_memory_store",
    10047: "the server has no room left: see its disk, max_file_store and max_memory_store",
    10077: "the stream is full and discards what is new: raise its limits (nats stream edit), or make room",
}
# Message larger than the stream takes; header block too large; the row names another stream than the subject's.
REJECTED = frozenset({10054, 10060, 10097})
CONFIGURATION = {
    10109: "the stream is sealed: it takes nothing any more; publish to another one",
    10174: "the stream does not allow batches",
    10205: "the stream does not allow batches",
}


_DELIVERED = re.compile(rb"HMSG \S+ \d+ (\$JS\.ACK\.\S+) \d+ (\d+)\r\n")
_OTHER = re.compile(rb"H?MSG [^\r\n]+ (\d+)\r\n")


class InnerParser(Protocol):
    """What we rely on in nats-py's parser; checked when the connection is opened."""

    buf: bytearray
    state: int

    def parse(self, data: bytes = b"") -> Awaitable[None]: ...
    def reset(self) -> None: ...


class Ack(NamedTuple):
    """JetStream's answer to one publish."""

    stream: str
    seq: int
    duplicate: bool
    code: int = 0  # err_code of an error, 0 for success
    error: str = ""


class AckParser:
    """Takes the frames that are addressed to `<inbox>.<token>`; the rest goes to the inner parser.

    on_acks(tokens, seqs): plain acknowledgements, many at a time, and the sequences that they name.
    on_reply(token, status, payload): anything else for us.
    on_stored(reply, headers): a message that a consumer delivers to us, while a stream is read back.
    """

    def __init__(
        self,
        inner: InnerParser,
        inbox: bytes,
        on_acks: Callable[[list[bytes], list[bytes]], None],
        on_reply: Callable[[bytes, bytes, bytes], None],
        on_stored: Callable[[bytes, bytes], None] | None = None,
    ) -> None:
        self._inner = inner
        self._on_stored = on_stored
        self._on_acks = on_acks
        self._on_reply = on_reply
        self._tail = b""  # the beginning of a frame of ours whose end has not arrived yet
        self.parsed = 0  # bytes that `parse` was given and is done with
        name = re.escape(inbox)
        plain = (
            rb"MSG %b\.(\d++) \d++ \d++\r\n"
            rb'\{"stream":"[^"\\\r\n]++",(?: ?"domain":"[^"\\\r\n]*+",)?+ ?+"seq":([1-9]\d*+)\}\r\n' % name
        )
        self._plain = re.compile(plain)
        self._run = re.compile(b"(?:" + plain + b")+")
        self._head = re.compile(rb"H?MSG %b\.(\d+) \d+ (?:(\d+) )?(\d+)\r\n" % name)
        self._starts = (b"MSG " + inbox + b".", b"HMSG " + inbox + b"." if on_stored is None else b"HMSG ")

    def reset(self) -> None:
        self._tail = b""
        self._inner.reset()

    async def parse(self, data: bytes = b"") -> None:
        given = len(data)
        try:
            if self._tail:
                data = self._tail + data
                self._tail = b""
            elif self._foreign:
                await self._inner.parse(data)  # its end is not ours to find
                return
            if data := self._run_of_acks(data):
                await self._frames(data)
        finally:
            self.parsed += given

    def take(self, data: bytes) -> bytes:
        """What came behind everything that was parsed: take the leading acks out of it, and return the rest."""
        return data if self._tail or self._foreign else self._run_of_acks(data)

    @property
    def _foreign(self) -> bool:
        """In the middle of a frame of somebody else."""
        return bool(self._inner.buf) or self._inner.state != AWAITING_CONTROL_LINE

    def _run_of_acks(self, data: bytes) -> bytes:
        parts = self._plain.split(data)  # [before, token, seq, between, token, seq, …, rest]
        if len(parts) == 1 or any(parts[:-1:3]):
            return data
        self._on_acks(parts[1::3], parts[2::3])
        return parts[-1]

    async def _frames(self, data: bytes) -> None:
        """Frame by frame, when there is more than plain acks."""
        at = 0
        while at < len(data):
            if run := self._run.match(data, at):
                tokens, seqs = zip(*self._plain.findall(data, at, run.end()), strict=True)
                self._on_acks(list(tokens), list(seqs))
                at = run.end()
            elif head := self._head.match(data, at):
                start, end = head.end(), head.end() + int(head[3])
                if len(data) < end + 2:
                    self._tail = data[at:]
                    return
                body = start + int(head[2] or 0)
                self._on_reply(head[1], data[start:body][9:12], data[body:end])
                at = end + 2
            elif self._on_stored is not None and (head := _DELIVERED.match(data, at)):
                end = head.end() + int(head[2])
                if len(data) < end + 2:
                    self._tail = data[at:]
                    return
                self._on_stored(head[1], data[head.end() : end])
                at = end + 2
            elif self._is_beginning(data[at : at + 4096]):
                self._tail = data[at:]
                return
            elif (other := _OTHER.match(data, at)) and len(data) >= other.end() + int(other[1]) + 2:
                end = other.end() + int(other[1]) + 2  # a whole frame of somebody else; behind it may be more of ours
                await self._inner.parse(data[at:end])
                at = end
            else:
                await self._inner.parse(data[at:])
                return

    def _is_beginning(self, data: bytes) -> bool:
        """True for the beginning of a control line of ours; a whole line that did not match is not ours."""
        return b"\n" not in data and any(s.startswith(data) or data.startswith(s) for s in self._starts)


def read(status: bytes, payload: bytes) -> Ack:
    """The answer in a reply's status and payload; raises ProtocolError if it is none."""
    if status == b"503":
        return Ack("", 0, duplicate=False, code=503, error="no responders")
    try:
        answer = orjson.loads(payload)
        if error := answer.get("error"):
            code = error.get("err_code") or error.get("code") or -1
            return Ack("", 0, duplicate=False, code=int(code), error=str(error.get("description", "")))
        return Ack(str(answer["stream"]), int(answer["seq"]), duplicate=bool(answer.get("duplicate", False)))
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
        raise ProtocolError(f"JetStream answered a publish with {status + b' ' + payload[:200]!r}") from None


def judge(ack: Ack, subject: str) -> RelayError | str | None:
    """What an answer means. None: stored. Text: the event is rejected for that reason. An error: all must stop."""
    if ack.code == 0:
        if ack.seq > 0:
            return None
        return SinkUnavailable(f"JetStream holds the id of an event on {subject} without having stored it (seq 0)")
    if ack.code == 503:
        return SinkUnavailable(
            f"nobody answers on {subject}: its stream has no leader at the moment, or no stream listens on it",
            hint="if this stays, check that a stream with this subject exists (nats stream ls)",
        )
    text = f"{ack.error} ({ack.code})"
    if ack.code in REJECTED:
        return f"JetStream: {text}"
    if ack.code in TRANSIENT:
        return SinkUnavailable(f"JetStream refuses {subject} for now: {text}", hint=_FULL.get(ack.code, ""))
    if hint := CONFIGURATION.get(ack.code):
        return SetupError(f"JetStream refuses {subject}: {text}", hint=hint)
    return ProtocolError(f"JetStream answered {subject} with an unknown error: {text}")


def again(error: RelayError) -> RelayError:
    """The same error as a new object: one raised from several places would collect their tracebacks."""
    copy = error.__class__.__new__(error.__class__)
    RelayError.__init__(copy, str(error), hint=error.hint)
    return copy
