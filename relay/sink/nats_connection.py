"""One connection to NATS. nats-py makes and keeps it; events go out and acks come in past it, because that is fast.

This is the only module that knows nats-py, and `_Wire` the only place that touches its private parts; they are checked
when the connection is opened, and without them everything goes through nats-py's public API (slower, same meaning).
Reconnecting is never left to nats-py: it would replay its buffer and so reorder a key. Nothing here knows streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import random
import re
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import orjson
import structlog

from relay.lean import without

with without("aiohttp"):  # for websockets: a fifth of the time to the first event
    import nats.errors
    from nats.aio import transport
    from nats.aio.client import Client
    from nats.aio.msg import Msg
    from nats.aio.transport import TcpTransport
    from nats.protocol.parser import Parser

from relay.config import JetStream, Tls, mask_url, read_secret
from relay.errors import AuthError, ConfigError, ProtocolError, RelayError, SetupError, SinkUnavailable
from relay.sink.nats_acks import AckParser
from relay.sink.nats_tap import Tap

log = structlog.get_logger("relay.sink.nats")

# asyncio says it of every server that closes a connection after nats-py has upgraded it to TLS; it means nothing.
logging.getLogger("asyncio").addFilter(lambda record: "eof_received() has no effect" not in record.getMessage())
# nats-py says it, with a traceback, when a pong arrives that nobody waits for any more: we let go while connecting.
logging.getLogger("nats.aio.client").addFilter(
    lambda record: not (record.exc_info and isinstance(record.exc_info[1], asyncio.InvalidStateError))
)

# One HPUB in pieces: they are copied once, when everything that is to be written is joined. Or, where the connection
# `joins`, many in one piece.
Frame = tuple[bytes, ...]

# RuntimeError: uvloop's answer where asyncio's own transport, closed a moment ago, drops what is written to it.
_GONE = (nats.errors.Error, OSError, RuntimeError)

_DENIED = "permissions violation for "
_AUTH_WORDS = ("authorization violation", "authentication", "expired", "revoked", "nkey", "jwt")


class Listener(Protocol):
    """Who is told what arrives; the sink."""

    def on_acks(self, tokens: list[bytes]) -> None: ...
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
        self._wire: _Wire | None = None
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
        options = _credentials(config)
        servers = list(config.servers)
        random.shuffle(servers)
        failures: list[RelayError] = []
        for url in [*servers, *(url for url in known if url not in servers)]:
            if urlsplit(url).scheme in ("ws", "wss"):
                vars(transport)["aiohttp"] = importlib.import_module("aiohttp")
            self._client = _Client(wants_tls=_wants_tls(url, config), certified=bool(config.tls and config.tls.cert))
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
                        **(options or _credentials_in(url, config.servers)),
                        **_encryption(url, config),
                    )
                await self._prepare(url)
            except BaseException as exc:
                await self.close()
                if not isinstance(exc, Exception):
                    raise
                failure = _translated(exc, mask_url(url), signed=bool(config.nkey_seed_file or config.credentials_file))
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
            raise _denied(self._denied[0])
        wire = _Wire(client)
        if _wants_tls(url, self._config) and not wire.encrypted():
            raise _no_tls()
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
            except _GONE as exc:
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
        except (*_GONE, ValueError) as exc:
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
                    raise _denied(text) from None
            raise SinkUnavailable(
                f"JetStream did not answer {subject} within {self._config.connect_timeout:g} s"
            ) from None
        except _GONE as exc:
            raise SinkUnavailable(f"the connection to NATS was lost: {exc}") from None
        if error := answer.get("error"):
            raise ApiError(error.get("code", 0), error.get("err_code", 0), error.get("description", "unknown error"))
        return answer

    async def headers(self, prefix: str, stream: str, first: int, last: int, quiet: float) -> dict[int, dict[str, str]]:
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
        subject = f"{self.inbox.decode()}-0"
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
        self._on_stored = take
        try:
            subscription = await self._client.subscribe(subject, cb=self._on_message)
        except _GONE as exc:
            raise SinkUnavailable(f"the connection to NATS was lost: {exc}") from None
        answer = await self.request(f"{prefix}.CONSUMER.CREATE.{stream}", {"stream_name": stream, "config": settings})
        while not done.is_set():
            before = len(found)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(quiet):
                    await done.wait()
            if len(found) == before:
                break
        with contextlib.suppress(RelayError, ApiError, *_GONE):
            await subscription.unsubscribe()
            await self.request(f"{prefix}.CONSUMER.DELETE.{stream}.{answer['name']}")
        return {seq: headers for seq, headers in found.items() if seq <= last}

    def abort(self) -> None:
        """Drop the connection with everything that was not sent yet."""
        self._outbox.clear()
        _Wire(self._client).abort()

    async def close(self) -> None:
        self._closed = True
        if self._publisher is not None:
            self._publisher.cancel()
        if not _Wire(self._client).exists():
            return
        self.abort()
        with contextlib.suppress(*_GONE, TimeoutError):
            async with asyncio.timeout(1):  # nothing to wait for: the socket is gone already
                await self._client.close()

    def _on_acks(self, tokens: list[bytes]) -> None:
        self._listener.on_acks(tokens)

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
        if _DENIED in text.lower():
            self._denied.append(text.lower())
            if not self._connecting:
                log.warning("right.denied", error=text)
                self._listener.on_lost(_denied(text))
        elif self._connecting and not self._closed:
            raise error  # nats-py would try the same server again and again
        elif not self._closed:
            self._lost(text or type(error).__name__)

    async def _on_disconnect(self) -> None:
        error = self._client.last_error
        if error is not None and not self._connecting and any(word in str(error).lower() for word in _AUTH_WORDS):
            self._listener.on_lost(_translated(error, "NATS"))
        self._lost(str(error) if error else "closed by the server")

    def _lost(self, why: str) -> None:
        if not self._closed and not self._connecting:
            log.info("connection.lost", broker="nats", reason=why)
            self._listener.on_lost(SinkUnavailable(f"the connection to NATS was lost: {why}"))


class _Client(Client):
    """Where TLS is asked for, nothing is sent in the clear to a server that offers none: neither password nor token."""

    def __init__(self, *, wants_tls: bool, certified: bool) -> None:
        super().__init__()
        self._wants_tls = wants_tls
        self._certified = certified

    def _connect_command(self) -> bytes:
        if self._wants_tls and not _Wire(self).encrypted():
            raise _no_tls()
        if self._server_info.get("tls_verify") and not self._certified:
            # Said by us: with TLS 1.3 the server's own refusal may be lost when it closes the connection behind it.
            raise AuthError(
                "the NATS server asks for a client certificate", hint="give cert and key in [sink.jetstream.tls]"
            )
        command: bytes = super()._connect_command()
        return command


class _Wire:
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


def header_map(block: bytes) -> dict[str, str]:
    """Headers by their names in lower case; the first of a name counts."""
    found: dict[str, str] = {}
    for line in block.decode(errors="replace").split("\r\n")[1:]:
        name, colon, value = line.partition(":")
        if colon:
            found.setdefault(name.lower(), value.strip())
    return found


def _ignore(_: bytes, __: bytes) -> None:
    """Nothing is being read back."""


def _nowhere(_: bytes) -> None:
    raise AssertionError("not connected")


def _credentials(config: JetStream) -> dict[str, Any]:
    """nats-py's options for user, token, nkey and credentials; unreadable files are ConfigErrors."""
    options: dict[str, Any] = {}
    if config.user is not None:
        options["user"] = config.user
    if config.password_file:
        options["password"] = read_secret(config.password_file)
    elif config.password:
        options["password"] = config.password.get_secret_value()
    if config.token_file:
        options["token"] = read_secret(config.token_file)
    elif config.token:
        options["token"] = config.token.get_secret_value()
    if config.nkey_seed_file:
        options["nkeys_seed_str"] = read_secret(config.nkey_seed_file)
    if config.credentials_file:
        content = read_secret(config.credentials_file)
        if not all(f"-----BEGIN {part}" in content for part in ("NATS USER JWT", "USER NKEY SEED")):
            # nats-py would look for them for ever
            raise ConfigError([f"{config.credentials_file}: is no .creds file with a user's JWT and seed"])
        options["user_credentials"] = str(config.credentials_file)
    return options


def _credentials_in(url: str, servers: Sequence[str]) -> dict[str, Any]:
    """User and password, or token, of the URL; of a discovered server: those of the first URL that has any."""
    for each in (url, *servers):
        parts = urlsplit(each)
        if parts.username is not None and parts.password is not None:
            return {"user": unquote(parts.username), "password": unquote(parts.password)}
        if parts.username is not None:
            return {"token": unquote(parts.username)}
    return {}


def _encryption(url: str, config: JetStream) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if config.tls:
        options["tls"] = _tls(config.tls)
    if config.tls and config.tls.hostname:
        options["tls_hostname"] = config.tls.hostname
    elif url not in config.servers:  # discovered by its address, while certificates are made out to names
        options["tls_hostname"] = urlsplit(config.servers[0]).hostname
    return options


def _wants_tls(url: str, config: JetStream) -> bool:
    return urlsplit(url).scheme in ("tls", "wss") or config.tls is not None


def _no_tls() -> SetupError:
    return SetupError(
        "the NATS server does not use TLS, but the configuration asks for it",
        hint="enable TLS in the server, or use a nats:// URL without [sink.jetstream.tls]",
    )


def _tls(tls: Tls) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert:
            context.load_cert_chain(tls.cert, tls.key)
    except (OSError, ssl.SSLError) as exc:
        raise ConfigError([f"sink.jetstream.tls: cannot load the certificates: {exc}"]) from None
    return context


def _denied(text: str) -> AuthError:
    right = text.lower().partition(_DENIED)[2].rstrip("'") or text
    return AuthError(
        f"NATS denies the right: {right}",
        hint="the relay's user needs publish on its subjects and on $JS.API.>, and subscribe on _INBOX.>",
    )


def _translated(error: Exception, url: str, *, signed: bool = False) -> RelayError:
    """What a failed connection means."""
    if isinstance(error, RelayError):
        return error
    text = str(error).removeprefix("nats: ").strip("'") or type(error).__name__
    if isinstance(error, ModuleNotFoundError):
        return SetupError(f"credentials by nkey need the package {error.name}", hint="pip install 'nats-py[nkeys]'")
    if isinstance(error, ssl.SSLCertVerificationError) or (isinstance(error, ssl.SSLError) and "ALERT" in text.upper()):
        return AuthError(f"TLS with {url} failed: {text}", hint="check sink.jetstream.tls: ca, cert, key and hostname")
    if isinstance(error, ssl.SSLError):
        return SinkUnavailable(f"TLS with {url} failed: {text}")
    if isinstance(error, nats.errors.AuthorizationError) or (
        isinstance(error, nats.errors.Error) and any(word in text.lower() for word in _AUTH_WORDS)
    ):
        return AuthError(
            f"{url} refuses the credentials: {text}", hint="check user, password, token, nkey or credentials"
        )
    if isinstance(error, TimeoutError):
        return SinkUnavailable(f"{url} did not answer in time")
    if isinstance(error, _GONE):
        return SinkUnavailable(f"cannot connect to {url}: {text}")
    if signed:  # nkeys raises its own exceptions for a seed it cannot read, and they share no base class
        return AuthError(f"cannot use the credentials for {url}: {type(error).__name__} {text}")
    return ProtocolError(f"unexpected {type(error).__name__} while connecting to {url}: {text}")
