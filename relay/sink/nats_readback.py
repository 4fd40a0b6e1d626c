"""What a stream holds, read by a consumer that exists for that moment only: the headers of many messages, and fast.

It asks for headers, never for payloads. It tells what came, and nothing about what did not: a message that is missing
here may be gone, or not be there yet where it was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TypeVar

from relay.errors import RelayError
from relay.sink.nats_access import GONE
from relay.sink.nats_connection import ApiError, NatsConnection

Kept = TypeVar("Kept")


async def read_headers(
    connection: NatsConnection,
    prefix: str,
    stream: str,
    first: int,
    last: int,
    quiet: float,
    keep: Callable[[bytes], Kept],
) -> dict[int, Kept]:
    """What `keep` makes of the headers of the messages from `first` to `last`, by sequence; many and fast.

    What is missing is not there, or was not there yet where it was asked for: a replica, which may be behind.
    """
    found: dict[int, Kept] = {}
    done = asyncio.Event()

    def take(reply: bytes, block: bytes) -> None:
        seq = int(reply.split(b".")[-4])  # $JS.ACK.….<stream seq>.<consumer seq>.<time>.<pending>
        found[seq] = keep(block)
        if seq >= last:
            done.set()

    # A subject of its own: a consumer does not see the interest of a wildcard.
    subject = f"{connection.inbox.decode()}-0"
    settings = {
        "deliver_subject": subject,
        "deliver_policy": "by_start_sequence",
        "opt_start_seq": first,
        "ack_policy": "none",
        "headers_only": True,
        "mem_storage": True,
        "num_replicas": 1,
        "inactive_threshold": 10_000_000_000,
    }
    subscription = await connection.receive(subject, take)
    answer = await connection.request(f"{prefix}.CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": settings})
    while not done.is_set():
        before = len(found)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(quiet):
                await done.wait()
        if len(found) == before:
            break
    with contextlib.suppress(RelayError, ApiError, *GONE):
        await subscription.unsubscribe()
        await connection.request(f"{prefix}.CONSUMER.DELETE.{stream}.{answer['name']}")
    return {seq: kept for seq, kept in found.items() if seq <= last}
