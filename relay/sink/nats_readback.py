"""What a stream holds, read by a consumer that exists for that moment only: the headers of many messages, and fast.

It asks for headers, never for payloads. It tells what came, and nothing about what did not: a message that is missing
here may be gone, or not be there yet where it was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib

from relay.errors import RelayError
from relay.sink.nats_access import GONE
from relay.sink.nats_connection import ApiError, NatsConnection


async def read_headers(
    connection: NatsConnection, prefix: str, stream: str, first: int, last: int, quiet: float
) -> dict[int, dict[str, str]]:
    """Headers (names in lower case) of the messages from `first` to `last`, by sequence; many and fast.

    What is missing is not there, or was not there yet where it was asked for: a replica, which may be behind.
    """
    found: dict[int, dict[str, str]] = {}
    done = asyncio.Event()

    def take(reply: bytes, block: bytes) -> None:
        seq = int(reply.split(b".")[-4])  # $JS.ACK.….<stream seq>.<consumer seq>.<time>.<pending>
        found[seq] = header_map(block)
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
    return {seq: headers for seq, headers in found.items() if seq <= last}


def header_map(block: bytes) -> dict[str, str]:
    """Headers by their names in lower case; the first of a name counts.

    Their values as they were sent, with spaces at both ends: an id of type char(n) has them, and is compared.
    """
    found: dict[str, str] = {}
    for line in block.decode(errors="replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.lower(), value.removeprefix(" "))
    return found
