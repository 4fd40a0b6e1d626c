"""The end of a fenced stream: which events it holds beyond the checkpoint's mark, and where the next one goes.

`read_chain` asks the stream. It never guesses: an id that it does not report as held is not in the stream beyond the
mark, or is reported as gone (consumed, expired, purged).
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
from collections.abc import Callable

from relay.errors import SetupError, SinkUnavailable
from relay.sink.nats_connection import ApiError, NatsConnection
from relay.sink.nats_readback import read_headers
from relay.sink.nats_streams import StreamState

log = logging.getLogger("relay.sink.nats")

_NO_MESSAGE = 10037
_AT_ONCE = 256  # requests under way while reading one by one
_FEW = 500  # so many are read one by one: a consumer costs some round trips
_HEADERS = re.compile(rb"^(nats-msg-id|relay-position|relay-replayed|id): ?([^\r\n]*)", re.IGNORECASE | re.MULTILINE)
_QUIET = 1.0  # seconds without a message after which a consumer has no more for us


class Chain:
    """One stream of the relay's own: `sent` is its last sequence if everything that was sent is stored."""

    __slots__ = (
        "_in_order",
        "at",
        "counting",
        "danger",
        "digits",
        "end",
        "left",
        "limit",
        "mark",
        "places",
        "quiet",
        "sent",
        "stream",
    )

    def __init__(self, stream: str, mark: int, places: list[bytes | None], *, counting: bool = False) -> None:
        """`places`: the ids behind the mark, up to the end of the stream; None where the message is gone.

        `counting`: they are the next events in the order in which they will come.
        """
        self.stream = stream
        self.mark = mark
        self.places = places
        self._in_order = counting
        self.counting = counting and None in places  # what is gone is known by its place
        self.at = 0  # all places before it have been met
        self.left = 0  # how many were not met yet
        self.sent = self.end = mark + len(places)
        self.danger = 0  # up to here a predecessor may still write, and other events than we would
        self.quiet: int | None = None  # from here on none can write: not every event needs an answer
        self.digits = len(str(self.sent))
        self.limit = 10**self.digits

    def grow(self) -> None:
        self.digits += 1
        self.limit *= 10

    def speaks_for_all(self, sent: int) -> bool:
        """Whether the last of the events that are sent behind `sent` may speak for all of them."""
        return self.quiet is not None and sent >= self.quiet

    def advance(self, count: int) -> None:
        """So many events were sent at once."""
        self.sent += count
        while self.sent >= self.limit:
            self.grow()

    def skips(self, held: dict[bytes, Chain]) -> bool:
        """Whether the next event is the message of the next place, which is gone. For events in the same order only."""
        self._advance(held)
        if self.at == len(self.places):
            self.counting = False
            return False
        if self.places[self.at] is None:
            self.at += 1
            self.left -= 1
            return True
        log.warning("stream %s holds other events than expected: what is gone cannot be counted", self.stream)
        self._stop_counting()
        return False

    def _stop_counting(self) -> None:
        self.counting = False
        self.left -= self.places[self.at :].count(None)

    def covered(self, held: dict[bytes, Chain]) -> int:
        """The sequence up to which everything was met, or sent by us."""
        self._advance(held)
        if self.left:
            return self.mark + self.at
        return self.sent

    def _advance(self, held: dict[bytes, Chain]) -> None:
        places, at, end = self.places, self.at, len(self.places)
        while at < end:
            place = places[at]
            if (self.counting and place is None) or (place is not None and held.get(place) is self):
                break
            at += 1
        self.at = at

    @property
    def countable(self) -> bool:
        """After `covered`: whether everything beyond it is simply what comes next, in its order."""
        if not self.left:
            return True
        return self._in_order and self.sent == self.end and self.left == len(self.places) - self.at

    def settle(self) -> None:
        """What was not met will not come any more."""
        self.places, self.at, self.left, self.counting = [], 0, 0, False


async def read_chain(
    connection: NatsConnection, prefix: str, stream: StreamState, mark: int | None, origin: str, *, counting: bool
) -> tuple[Chain, list[str]]:
    """The chain as the stream is now, and the writers other than ours that are beyond the mark."""
    name = stream.name
    info = await connection.request(f"{prefix}.STREAM.INFO.{name}")
    if "cluster" in info and not info["cluster"].get("leader"):
        # Then its servers answer for themselves, and may be behind what was acknowledged.
        raise SinkUnavailable(f"stream {name} has no leader at the moment")
    first, last = int(info["state"]["first_seq"]), int(info["state"]["last_seq"])
    if mark is None:
        return Chain(name, last, []), []
    if last < mark:
        raise SetupError(
            f"stream {name} ends at sequence {last}, but this relay has stored events up to {mark}",
            hint="the stream was restored, or deleted and made again: what it lost is not published again by itself. "
            f"To go on from here: UPDATE outbox_relay_checkpoint SET sink = sink - '{name}' "
            f"WHERE relay = '{origin.partition(':')[0]}'",
        )
    wanted = range(max(mark + 1, first), last + 1)
    found: dict[int, bytes | str] = {}

    def keep(block: bytes) -> bytes | str:
        return _told(block, origin.encode() + b":")

    if len(wanted) > _FEW and stream.retention == "limits":  # elsewhere a consumer would take part in the retention
        try:
            found = await read_headers(connection, prefix, name, wanted[0], wanted[-1], _QUIET, keep)
        except ApiError as exc:
            log.info("stream %s is read back message by message: %s", name, exc)
    await _ask(connection, prefix, name, [seq for seq in wanted if seq not in found], found, keep)
    places: list[bytes | None] = [None] * (last - mark)
    strangers = []
    for seq, told in sorted(found.items()):
        if isinstance(told, str):
            strangers.append(told or f"an unknown writer (sequence {seq})")
        else:
            places[seq - mark - 1] = told
    return Chain(name, mark, places, counting=counting), strangers


def _told(block: bytes, ours: bytes) -> bytes | str:
    """Of a message's headers: the id of an event of ours, whose position begins so; else, as text, who wrote it.

    A hundred thousand messages are held at once, so that is all that is kept. Values are taken as they were sent, with
    spaces at both ends: an id of type char(n) has them, and is compared. The first of a name counts.
    """
    headers: dict[bytes, bytes] = {name.lower(): value for name, value in reversed(_HEADERS.findall(block))}
    event_id, position = headers.get(b"nats-msg-id"), headers.get(b"relay-position", b"")
    if not event_id and (event_id := headers.get(b"id")) and (run := headers.get(b"relay-replayed")):
        event_id += b":replay:" + run  # what a replay makes of it
    return event_id if event_id is not None and position.startswith(ours) else position.decode(errors="replace")


async def _ask(
    connection: NatsConnection,
    prefix: str,
    stream: str,
    wanted: list[int],
    found: dict[int, bytes | str],
    keep: Callable[[bytes], bytes | str],
) -> None:
    """Read messages one by one from the stream's leader, which knows for sure."""

    async def look(seq: int) -> None:
        try:
            answer = await connection.request(f"{prefix}.STREAM.MSG.GET.{stream}", {"seq": seq})
        except ApiError as exc:
            if exc.err_code != _NO_MESSAGE:
                raise SinkUnavailable(f"stream {stream} cannot be read back: {exc}") from None
            return
        found[seq] = keep(base64.b64decode(answer["message"].get("hdrs", "")))

    for start in range(0, len(wanted), _AT_ONCE):
        await asyncio.gather(*map(look, wanted[start : start + _AT_ONCE]))
