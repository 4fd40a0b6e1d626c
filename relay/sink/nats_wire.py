"""The wire below nats-py: its socket, which events are written to, and its parser's place, where acks are taken out.

`Wire` is the only place that needs nats-py's private parts (what the server said of itself is read elsewhere, too).
They are checked when the connection is opened (`usable`), and without them everything goes through nats-py's public
API. Nothing here waits, or knows what is said.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from relay.errors import AuthError
from relay.lean import without

with without("aiohttp"):  # for websockets: a fifth of the time to the first event
    from nats.aio.client import Client
    from nats.aio.transport import TcpTransport
    from nats.protocol.parser import Parser

from relay.sink.nats_access import no_tls
from relay.sink.nats_acks import AckParser
from relay.sink.nats_tap import Tap

# asyncio says it of every server that closes a connection after nats-py has upgraded it to TLS; it means nothing.
logging.getLogger("asyncio").addFilter(lambda record: "eof_received() has no effect" not in record.getMessage())
# nats-py says it, with a traceback, when a pong arrives that nobody waits for any more: we let go while connecting.
logging.getLogger("nats.aio.client").addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.InvalidStateError))
)


class Wire:
    """nats-py's private parts, all of them: the transport below its buffers and the parser's place in its read loop."""

    def __init__(self, client: Client) -> None:
        self._client: Any = client
        self._transport: Any = getattr(client, "_transport", None)
        writer = getattr(self._transport, "_io_writer", None)
        self.write: Callable[[bytes], None] = getattr(writer, "write", _nowhere)
        self._io: Any = getattr(writer, "transport", None)

    def exists(self) -> bool:
        return self._transport is not None

    def usable(self) -> bool:
        parser = getattr(self._client, "_ps", None)
        return (
            isinstance(self._transport, TcpTransport)
            and self.write is not _nowhere
            and isinstance(parser, Parser)
            and all(hasattr(parser, name) for name in ("buf", "state", "parse", "reset"))
        )

    def parser(self) -> Any:
        return self._client._ps  # noqa: SLF001

    def intercept(self, parser: AckParser) -> None:
        self._client._ps = parser  # noqa: SLF001
        if (waiting := self._waiting()) is not None:
            self._io.set_protocol(Tap(self._io.get_protocol(), parser, waiting))

    def _waiting(self) -> int | None:
        """Bytes that arrived and were not read by nats-py yet; None where nobody can tell."""
        buffer = getattr(getattr(self._transport, "_io_reader", None), "_buffer", None)
        return None if buffer is None else len(buffer)

    def encrypted(self) -> bool:
        if self._io is not None:
            return self._io.get_extra_info("ssl_object") is not None
        return bool(getattr(self._transport, "_using_tls", True))

    def abort(self) -> None:
        self._client._pending = []  # noqa: SLF001  or close() would wait for the server to take it
        self._client._pending_data_size = 0  # noqa: SLF001
        if self._io is not None:
            self._io.abort()


def _nowhere(_: bytes) -> None:
    raise AssertionError("not connected")


class GuardedClient(Client):
    """Where TLS is asked for, nothing is sent in the clear to a server that offers none: neither password nor token."""

    def __init__(self, *, wants_tls: bool, certified: bool) -> None:
        super().__init__()
        self._wants_tls = wants_tls
        self._certified = certified

    def _connect_command(self) -> bytes:
        if self._wants_tls and not Wire(self).encrypted():
            raise no_tls()
        if self._server_info.get("tls_verify") and not self._certified:
            # Said by us: with TLS 1.3 the server's own refusal may be lost when it closes the connection behind it.
            raise AuthError(
                "the NATS server asks for a client certificate", hint="give cert and key in [sink.jetstream.tls]"
            )
        command: bytes = super()._connect_command()
        return command
