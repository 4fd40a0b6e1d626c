"""One connection to NATS. nats-py makes and keeps it; events go out and acks come in past it, because that is fast.

Only this module, `nats_wire` (what is below nats-py) and `nats_access` (who we are, and why we were not let in) know
nats-py. Without the parts of it that `nats_wire` needs everything goes through its public API (slower, same meaning).
Reconnecting is never left to nats-py: it would replay its buffer and so reorder a key. Nothing here knows streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import random
import re
from collections import deque
from collections.abc import Callable
from itertools import chain
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson
import structlog

from relay.lean import without

with without("aiohttp"):  # for websockets: a fifth of the time to the first event
    import nats.errors
    from nats.aio import transport
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.subscription import Subscription

from relay.config import JetStream, mask_url
from relay.errors import RelayError, SetupError, SinkUnavailable
from relay.sink import nats_access
from relay.sink.nats_access import AUTH_WORDS, DENIED, GONE
from relay.sink.nats_acks import AckParser
from relay.sink.nats_wire import GuardedClient, Wire

log = structlog.get_logger("relay.sink.nats")

# One HPUB in pieces: they are copied once, when everything that is to be written is joined. Or, where the connection
# `joins`, many in one piece.
Frame = tuple[bytes, ...]


class Listener(Protocol):
    """Who is told what arrives; the sink."""

    def on_acks(self, tokens: list[bytes], seqs: list[bytes]) -> None: ...
    def on_reply(self, token: bytes, status: bytes, payload: bytes) -> None: ...
    def on_lost(self, error: RelayError) -> None: ...


class ApiError(Exception):
    """An error that the JetStream API answered; translated where it is known what was asked."""

    def __init__(self, code: int, err_code: int, description: str) -> None:
        super().__init__(f"{description} ({err_code or code})")
        self.code = code
        self.err_code = err_code


class NatsConnection:
    """Opened once, used until it fails or is closed; then a new one is made."""

    def __init__(self, config: JetStream, *, direct: bool = True) -> None:
        self._config = config
        self._listener: Listener
        self._direct = direct
        self._client = Client()
        self._wire: Wire | None = None
        self._connecting = True
        self._closed = False
        self._denied: list[str] = []
        self._outbox: deque[Frame] = deque()
        self._publisher: asyncio.Task[None] | None = None
        self._on_stored: Callable[[bytes, bytes], None] = _ignore
        self.inbox = b""
        self.max_payload = 0
        self.discovered: list[str] = []

    async def open(self, listener: Listener, known: list[str]) -> None:
        """Connect to one of the servers (`known`: further ones that earlier connections were told of)."""
        self._listener = listener
        config = self._config
        options = nats_access.credentials(config)
        servers = list(config.servers)
        random.shuffle(servers)
        failures: list[RelayError] = []
        for url in [*servers, *(url for url in known if url not in servers)]:
            if urlsplit(url).scheme in ("ws", "wss"):
                vars(transport)["aiohttp"] = importlib.import_module("aiohttp")
            self._client = GuardedClient(
                wants_tls=nats_access.wants_tls(url, config), certified=bool(config.tls and config.tls.cert)
            )
            self._closed = False
            try:
                async with asyncio.timeout(config.connect_timeout):
                    await self._client.connect(
                        [url],
                        name="relay",
                        allow_reconnect=False,
                        connect_timeout=max(1, round(config.connect_timeout)),
                        ping_interval=30,
                        error_cb=self._on_error,
                        disconnected_cb=self._on_disconnect,
                        closed_cb=self._on_disconnect,
                        **(options or nats_access.credentials_in(url, config.servers)),
                        **nats_access.encryption(url, config),
                    )
                await self._prepare(url)
            except BaseException as exc:
                await self.close()
                if not isinstance(exc, Exception):
                    raise
                failure = nats_access.translated(
                    exc, mask_url(url), signed=bool(config.nkey_seed_file or config.credentials_file)
                )
                if url not in servers:  # nobody vouched for it: what it refuses is no reason to stop
                    failure = SinkUnavailable(str(failure), hint=failure.hint)
                failures.append(failure)
                continue
            return
        failures.sort(key=lambda error: isinstance(error, SinkUnavailable))  # what waiting will not cure comes first
        error = failures[0]
        error.args = ("; ".join(dict.fromkeys(str(failure) for failure in failures)),)
        raise error

    async def _prepare(self, url: str) -> None:
        client = self._client
        self.inbox = client.new_inbox().encode()
        self.max_payload = client.max_payload
        await client.subscribe(f"{self.inbox.decode()}.*", cb=self._on_message)
        await client.flush(
            max(1, round(self._config.connect_timeout))
        )  # the server has the subscription, or refused it
        if self._denied:
            raise nats_access.denied(self._denied[0])
        wire = Wire(client)
        if nats_access.wants_tls(url, self._config) and not wire.encrypted():
            raise nats_access.no_tls()
        if self._direct and wire.usable():
            wire.intercept(AckParser(wire.parser(), self.inbox, self._on_acks, self._on_reply, self._stored))
            self._wire = wire
        else:
            log.info(
                "fast_path.skipped", reason="publishing through nats-py's public API: this is not its TCP transport"
            )
        if urlsplit(url).scheme == "nats":
            self.discovered = [server.geturl() for server in client.discovered_servers]
        self._connecting = False

    @property
    def has_jetstream(self) -> bool:
        """False only where the server itself says that it is alone and has no JetStream."""
        info = getattr(self._client, "_server_info", {})
        return bool(info.get("jetstream") or info.get("cluster") or self._config.domain)

    @property
    def version(self) -> tuple[int, ...]:
        """Of the server, as (major, minor, patch)."""
        return tuple(
            int(part) for part in re.findall(r"\d+", getattr(self._client, "_server_info", {}).get("version", ""))[:3]
        )

    def listen(self, listener: Listener) -> None:
        """From now on somebody else is told what arrives."""
        self._listener = listener

    @property
    def joins(self) -> bool:
        """Whether frames are written as they are; else each is taken apart for nats-py."""
        return self._wire is not None

    def send(self, frames: list[Frame]) -> None:
        """Write whole frames, in order. Never waits: what the socket does not take yet is bounded by the window."""
        if self._wire is not None:
            data = frames[0][0] if len(frames) == len(frames[0]) == 1 else b"".join(chain.from_iterable(frames))
            try:
                self._wire.write(data)
            except GONE as exc:
                self._lost(f"cannot write: {exc}")
            return
        self._outbox.extend(frames)
        if self._publisher is None:
            self._publisher = asyncio.get_running_loop().create_task(self._publish())

    async def _publish(self) -> None:
        """The slow way out, for other transports: takes the frames apart again for nats-py."""
        try:
            while self._outbox:
                line, rest = b"".join(self._outbox.popleft()).split(b"\r\n", 1)
                _, subject, *reply, size, _ = line.decode().split(" ")
                names = [header.split(": ", 1) for header in rest[: int(size)].decode().split("\r\n")[1:-2]]
                headers = dict(names)
                await self._client.publish(subject, rest[int(size) : -2], reply[0] if reply else "", headers)
        except (*GONE, ValueError) as exc:
            self._lost(f"cannot publish: {exc}")
        finally:
            self._publisher = None

    async def request(self, subject: str, payload: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask the JetStream API. Raises ApiError for an error answer, one of ours where there is no answer."""
        try:
            message = await self._client.request(
                subject, orjson.dumps(payload) if payload else b"", timeout=self._config.connect_timeout
            )
            answer: dict[str, Any] = orjson.loads(message.data)
        except nats.errors.NoRespondersError:
            if self.has_jetstream:
                raise SinkUnavailable(f"JetStream does not answer ({subject}): no leader yet, or not enabled") from None
            raise SetupError(
                "the NATS server has no JetStream", hint="start it with -js, or put jetstream {} into its configuration"
            ) from None
        except nats.errors.TimeoutError:
            for text in self._denied:
                if f'"{subject.lower()}"' in text:
                    raise nats_access.denied(text) from None
            raise SinkUnavailable(
                f"JetStream did not answer {subject} within {self._config.connect_timeout:g} s"
            ) from None
        except GONE as exc:
            raise SinkUnavailable(f"the connection to NATS was lost: {exc}") from None
        if error := answer.get("error"):
            raise ApiError(error.get("code", 0), error.get("err_code", 0), error.get("description", "unknown error"))
        return answer

    async def receive(self, subject: str, take: Callable[[bytes, bytes], None]) -> Subscription:
        """From now on `take` gets what a consumer delivers to this subject: its reply subject, and its headers."""
        self._on_stored = take
        try:
            return await self._client.subscribe(subject, cb=self._on_message)
        except GONE as exc:
            raise SinkUnavailable(f"the connection to NATS was lost: {exc}") from None

    def abort(self) -> None:
        """Drop the connection with everything that was not sent yet."""
        self._outbox.clear()
        Wire(self._client).abort()

    async def close(self) -> None:
        self._closed = True
        if self._publisher is not None:
            self._publisher.cancel()
        if not Wire(self._client).exists():
            return
        self.abort()
        with contextlib.suppress(*GONE, TimeoutError):
            async with asyncio.timeout(1):  # nothing to wait for: the socket is gone already
                await self._client.close()

    def _on_acks(self, tokens: list[bytes], seqs: list[bytes]) -> None:
        self._listener.on_acks(tokens, seqs)

    def _on_reply(self, token: bytes, status: bytes, payload: bytes) -> None:
        self._listener.on_reply(token, status, payload)

    def _stored(self, reply: bytes, block: bytes) -> None:
        self._on_stored(reply, block)

    async def _on_message(self, message: Msg) -> None:
        """Acks that came through nats-py's parser."""
        if message.reply.startswith("$JS"):
            lines = [f"{name}: {value}" for name, value in (message.headers or {}).items()]
            self._on_stored(message.reply.encode(), "\r\n".join(["", *lines]).encode())
            return
        token = message.subject.rpartition(".")[2].encode()
        status = (message.headers or {}).get("Status", "")
        self._listener.on_reply(token, status.encode(), message.data)

    async def _on_error(self, error: Exception) -> None:
        text = str(error)
        if DENIED in text.lower():
            self._denied.append(text.lower())
            if not self._connecting:
                log.warning("right.denied", error=text)
                self._listener.on_lost(nats_access.denied(text))
        elif self._connecting and not self._closed:
            raise error  # nats-py would try the same server again and again
        elif not self._closed:
            self._lost(text or type(error).__name__)

    async def _on_disconnect(self) -> None:
        error = self._client.last_error
        if error is not None and not self._connecting and any(word in str(error).lower() for word in AUTH_WORDS):
            self._listener.on_lost(nats_access.translated(error, "NATS"))
        self._lost(str(error) if error else "closed by the server")

    def _lost(self, why: str) -> None:
        if not self._closed and not self._connecting:
            log.info("connection.lost", broker="nats", reason=why)
            self._listener.on_lost(SinkUnavailable(f"the connection to NATS was lost: {why}"))


def _ignore(_: bytes, __: bytes) -> None:
    """Nothing is being read back."""
