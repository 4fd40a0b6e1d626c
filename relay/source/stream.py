"""The stream source: WAL → batches of events, in commit order.

Rows arrive only after their transaction committed, so they are handed on as they come; a transaction is never buffered.
Batches form by themselves: what the socket has, up to a cap. So latency is lowest when the outbox is quiet, and batches
grow under load. None waits to be filled: only for the rest of a transaction that is probably being sent, a millisecond
at most (ADR 0014), and in a backlog, which is late anyway, between two looks at the socket (ADR 0022). A keepalive is a
position in the same order as the commits: an idle outbox pins no WAL, however busy other tables are (G7).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from relay.errors import SourceUnavailable
from relay.event import Batch, Rejected
from relay.lsn import LSN
from relay.progress import Progress
from relay.source.decoder import Decoder, sent_at
from relay.source.replication import WalSender

_MAX_BYTES = 1 << 20
_REST = 0.001  # for the rest of a transaction; timers of the loop have whole milliseconds
_LATE = 0.5  # seconds from its commit until Postgres sent it: by then it is one of a backlog
_GULP = 0.03  # so long Postgres may fill the socket meanwhile: it sends at less cost while nobody reads (ADR 0022)


class StreamSource:
    """Reads one started walsender session until it ends or is closed."""

    def __init__(
        self, wal: WalSender, decoder: Decoder, progress: Progress, *, max_batch_events: int, silence: float
    ) -> None:
        self._wal = wal
        self._decoder = decoder
        self._progress = progress
        self._max_messages = max_batch_events
        self._silence = silence  # a server that says nothing for so long is lost
        self._confirmed = decoder.end
        self._usual = 0  # events of the newest transaction that is complete

    async def batches(self) -> AsyncIterator[Batch]:
        """Batches in commit order, until the session fails."""
        wal, decoder, progress = self._wal, self._decoder, self._progress
        told = decoder.end
        backlog = False
        while True:
            if backlog:
                wal.narrow()
            if backlog and wal.exhausted:
                await asyncio.sleep(_GULP)
            elif not wal.exhausted:
                await asyncio.sleep(0)  # let acknowledgements in, also while the socket always has more
            elif not await wal.readable(self._silence):
                raise SourceUnavailable(
                    f"Postgres was silent for {self._silence:.0f} s: the network is cut, or it hangs"
                )
            messages, size = wal.take(self._max_messages, _MAX_BYTES)
            if not messages:
                backlog = False
                continue
            rejected: list[Rejected] = []
            events = decoder.decode(messages, rejected)
            sent = sent_at(messages[-1])
            if wal.exhausted and not backlog and 0 < decoder.unfinished < self._usual:
                await asyncio.sleep(_REST)
                messages, more = wal.take(self._max_messages - len(messages), _MAX_BYTES)
                events += decoder.decode(messages, rejected)
                size += more
            now = progress.last_heard = time.monotonic()
            progress.received_events += len(events) + len(rejected)
            transactions, decoder.transactions = decoder.transactions, []
            if transactions:
                self._usual = transactions[-1][2]
            progress.received_transactions += len(transactions)
            progress.skipped_events += decoder.skipped
            decoder.skipped = 0
            progress.received_lsn = decoder.end
            if decoder.reply_due:
                decoder.reply_due = False
                wal.send_status(decoder.end, self._confirmed, reply=False)
            if not events and not rejected and not transactions and decoder.end == told:
                continue  # only the beginning of a transaction: Postgres sends every message by itself
            told = decoder.end
            backlog = bool(events) and sent - events[-1].transaction.committed_at > _LATE
            yield Batch(events, told, size, now, rejected, transactions)

    async def confirm(self, lsn: LSN) -> None:
        if lsn > self._confirmed:
            self._confirmed = lsn
            self._wal.send_status(self._decoder.end, lsn, reply=False)

    async def attend(self) -> None:
        """Keep the session alive, also while nobody reads: say where we are, and ask for a sign of life."""
        while True:
            self._wal.send_status(self._decoder.end, self._confirmed, reply=True)
            await asyncio.sleep(min(10.0, self._silence / 3))
