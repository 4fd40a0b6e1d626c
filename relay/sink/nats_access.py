"""What NATS asks of a client before it lets it in: credentials and TLS; and what a connection that failed means.

Files of secrets and certificates are read here; nothing connects, nothing waits. It never says a secret, and never
takes an error that nobody knows for a harmless one.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

from relay.config import JetStream, Tls, read_secret
from relay.errors import AuthError, ConfigError, ProtocolError, RelayError, SetupError, SinkUnavailable
from relay.lean import without

with without("aiohttp"):  # for websockets: a fifth of the time to the first event
    import nats.errors

# RuntimeError: uvloop's answer where asyncio's own transport, closed a moment ago, drops what is written to it.
GONE = (nats.errors.Error, OSError, RuntimeError)

DENIED = "permissions violation for "
AUTH_WORDS = ("authorization violation", "authentication", "expired", "revoked", "nkey", "jwt")


def credentials(config: JetStream) -> dict[str, Any]:
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


def credentials_in(url: str, servers: Sequence[str]) -> dict[str, Any]:
    """User and password, or token, of the URL; of a discovered server: those of the first URL that has any."""
    for each in (url, *servers):
        parts = urlsplit(each)
        if parts.username is not None and parts.password is not None:
            return {"user": unquote(parts.username), "password": unquote(parts.password)}
        if parts.username is not None:
            return {"token": unquote(parts.username)}
    return {}


def encryption(url: str, config: JetStream) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if config.tls:
        options["tls"] = _tls(config.tls)
    if config.tls and config.tls.hostname:
        options["tls_hostname"] = config.tls.hostname
    elif url not in config.servers:  # discovered by its address, while certificates are made out to names
        options["tls_hostname"] = urlsplit(config.servers[0]).hostname
    return options


def wants_tls(url: str, config: JetStream) -> bool:
    return urlsplit(url).scheme in ("tls", "wss") or config.tls is not None


def no_tls() -> SetupError:
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


def denied(text: str) -> AuthError:
    right = text.lower().partition(DENIED)[2].rstrip("'") or text
    return AuthError(
        f"NATS denies the right: {right}",
        hint="the relay's user needs publish on its subjects and on $JS.API.>, and subscribe on _INBOX.>",
    )


def translated(error: Exception, url: str, *, signed: bool = False) -> RelayError:
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
        isinstance(error, nats.errors.Error) and any(word in text.lower() for word in AUTH_WORDS)
    ):
        return AuthError(
            f"{url} refuses the credentials: {text}", hint="check user, password, token, nkey or credentials"
        )
    if isinstance(error, TimeoutError):
        return SinkUnavailable(f"{url} did not answer in time")
    if isinstance(error, GONE):
        return SinkUnavailable(
            f"cannot connect to {url}: {text}", hint="does nats-server run there, and is sink.jetstream.servers right?"
        )
    if signed:  # nkeys raises its own exceptions for a seed it cannot read, and they share no base class
        return AuthError(f"cannot use the credentials for {url}: {type(error).__name__} {text}")
    return ProtocolError(f"unexpected {type(error).__name__} while connecting to {url}: {text}")
