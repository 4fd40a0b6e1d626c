"""Kafka with its doors locked: TLS, client certificates and SASL on one broker with a listener for each."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._scram import ScramCredentialInfo, ScramMechanism, UserScramCredentialUpsertion

from relay import config
from relay.embedded import KafkaServer
from relay.embedded.kafka import one_node
from relay.embedded.process import free_port
from relay.errors import AuthError, ConfigError, SinkUnavailable
from relay.sink.kafka import KafkaSink
from tests.certificates import Authority
from tests.fix_postgres import Database
from tests.fix_services import loudly
from tests.refusals import accepted, refused
from tests.relays import prepare, settings
from tests.sinks import batch_of, make_event, read_kafka

SECRET = "hunter2-geheim"
KINDS = {"TLS": "SSL", "MTLS": "SSL", "PLAIN": "SASL_PLAINTEXT", "SCRAM": "SASL_SSL", "OAUTH": "SASL_PLAINTEXT"}
LOGIN = "org.apache.kafka.common.security"


class Fortress:
    """One broker: an open listener for the test itself, and a locked one of each kind."""

    def __init__(self, authority: Authority) -> None:
        self.authority = authority
        self._ports = {kind: free_port() for kind in KINDS}
        port, controller = free_port(), free_port()
        certificate = authority.server("kafka")
        plain = one_node(port, controller)
        locked = "".join(f",{kind}://127.0.0.1:{port}" for kind, port in self._ports.items())
        protocols = "".join(f",{kind}:{protocol}" for kind, protocol in KINDS.items())
        self.server = KafkaServer(
            {
                **{name: plain[name] + locked for name in ("listeners", "advertised.listeners")},
                "controller.quorum.voters": plain["controller.quorum.voters"],
                "listener.security.protocol.map": plain["listener.security.protocol.map"] + protocols,
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(certificate.both),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(authority.ca),
                "listener.name.mtls.ssl.client.auth": "required",
                "listener.name.plain.sasl.enabled.mechanisms": "PLAIN",
                "listener.name.plain.plain.sasl.jaas.config": (
                    f'{LOGIN}.plain.PlainLoginModule required user_relay="{SECRET}";'
                ),
                "listener.name.scram.sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
                **{
                    f"listener.name.scram.scram-sha-{bits}.sasl.jaas.config": (
                        f"{LOGIN}.scram.ScramLoginModule required;"
                    )
                    for bits in (256, 512)
                },
                "listener.name.oauth.sasl.enabled.mechanisms": "OAUTHBEARER",
                "listener.name.oauth.oauthbearer.sasl.jaas.config": (
                    f"{LOGIN}.oauthbearer.OAuthBearerLoginModule required;"
                ),
            }
        )
        self.server.port, self.server.bootstrap = port, f"127.0.0.1:{port}"

    def set_passwords(self) -> None:
        admin = AdminClient({"bootstrap.servers": self.server.bootstrap, "log_level": 0})
        for mechanism in (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512):
            info = ScramCredentialInfo(mechanism, 4096)
            change = UserScramCredentialUpsertion("relay", info, SECRET.encode())
            for done in admin.alter_user_scram_credentials([change]).values():
                done.result(30)

    def options(self, kind: str, **more: Any) -> dict[str, Any]:
        """What opens the listener, in librdkafka's names (`_` for `.`); `more` overrides."""
        options = {"bootstrap.servers": f"127.0.0.1:{self._ports[kind]}", "security.protocol": KINDS[kind]}
        if "SSL" in KINDS[kind]:
            options["ssl.ca.location"] = str(self.authority.ca)
        if kind == "MTLS":
            pair = self.authority.client("relay")
            options |= {"ssl.certificate.location": str(pair.cert), "ssl.key.location": str(pair.key)}
        if kind in ("PLAIN", "SCRAM"):
            mechanism = "PLAIN" if kind == "PLAIN" else "SCRAM-SHA-512"
            options |= {"sasl.mechanism": mechanism, "sasl.username": "relay", "sasl.password": SECRET}
        if kind == "OAUTH":
            options["sasl.mechanism"] = "OAUTHBEARER"
        options |= {name.replace("_", "."): value for name, value in more.items()}
        return {name: value for name, value in options.items() if value is not None}


@pytest.fixture(scope="module")
def fortress(authority: Authority) -> Iterator[Fortress]:
    found = Fortress(authority)
    with loudly(), found.server:
        found.set_passwords()
        yield found


def sink_of(options: dict[str, Any], **more: Any) -> KafkaSink:
    return KafkaSink(config.Kafka.model_validate({"options": options, "create_topics": True, **more}))


async def publishes(fortress: Fortress, topic: str, options: dict[str, Any]) -> None:
    """The sink opens, creates its topic, and an event is there."""
    sink = sink_of(options, topics=[topic])
    try:
        await sink.open()
        assert await sink.publish(batch_of([make_event(1, topic=topic)])) == []
    finally:
        await sink.close()
    assert len(await asyncio.to_thread(read_kafka, fortress.server.bootstrap, topic)) == 1


# --- right ones


@pytest.mark.parametrize("kind", ["TLS", "MTLS", "PLAIN", "SCRAM"])
async def test_every_lock_has_a_key(kind: str, fortress: Fortress, prefix: str) -> None:
    await publishes(fortress, prefix, fortress.options(kind))


async def test_the_shorter_scram_and_a_password_from_a_file(fortress: Fortress, prefix: str, tmp_path: Path) -> None:
    (tmp_path / "password").write_text(f"{SECRET}\n")
    password = {"file": str(tmp_path / "password")}
    await publishes(fortress, prefix, fortress.options("SCRAM", sasl_mechanism="SCRAM-SHA-256", sasl_password=password))


async def test_an_encrypted_key_and_certificates_inline(fortress: Fortress, prefix: str) -> None:
    locked = fortress.authority.client("relay", password=SECRET)
    files = {"ssl_certificate_location": str(locked.cert), "ssl_key_location": str(locked.key)}
    await publishes(fortress, prefix, fortress.options("MTLS", **files, ssl_key_password=SECRET))
    pair = fortress.authority.client("relay")
    none = dict.fromkeys(("ssl_certificate_location", "ssl_key_location", "ssl_ca_location"))
    inline = {
        "ssl_certificate_pem": pair.cert.read_text(),
        "ssl_key_pem": {"file": str(pair.key)},
        "ssl_ca_pem": fortress.authority.ca.read_text(),
    }
    await publishes(fortress, f"{prefix}.inline", fortress.options("MTLS", **none, **inline))


async def test_oauth_without_a_signature(fortress: Fortress, prefix: str) -> None:
    options = fortress.options("OAUTH", sasl_oauthbearer_config="principal=relay")
    await publishes(fortress, prefix, options | {"enable.sasl.oauthbearer.unsecure.jwt": True})


@asynccontextmanager
async def token_endpoint() -> AsyncIterator[str]:
    """An identity provider that knows one client; its tokens are unsigned, and the test's broker takes them."""
    known = base64.b64encode(f"relay:{SECRET}".encode())

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        now = int(time.time())
        parts = [{"alg": "none"}, {"sub": "relay", "iat": now, "exp": now + 600}]
        token = ".".join(base64.urlsafe_b64encode(json.dumps(each).encode()).decode().rstrip("=") for each in parts)
        status, body = "401 Unauthorized", {"error": "invalid_client"}
        if known in head:
            status, body = "200 OK", {"access_token": f"{token}.", "token_type": "Bearer"}
        text = json.dumps(body)
        headers = f"Content-Type: application/json\r\nContent-Length: {len(text)}\r\nConnection: close"
        writer.write(f"HTTP/1.1 {status}\r\n{headers}\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    port = free_port()
    async with await asyncio.start_server(answer, "127.0.0.1", port):
        yield f"http://127.0.0.1:{port}/token"


def oidc(fortress: Fortress, endpoint: str, secret: str = SECRET) -> dict[str, Any]:
    return fortress.options(
        "OAUTH",
        sasl_oauthbearer_method="oidc",
        sasl_oauthbearer_client_id="relay",
        sasl_oauthbearer_client_secret=secret,
        sasl_oauthbearer_token_endpoint_url=endpoint,
    )


async def test_oauth_with_an_identity_provider(fortress: Fortress, prefix: str) -> None:
    async with token_endpoint() as endpoint:
        await publishes(fortress, prefix, oidc(fortress, endpoint))
        with pytest.raises(AuthError, match="invalid_client") as caught:
            await publishes(fortress, prefix, oidc(fortress, endpoint, "hunter3"))
    assert "hunter3" not in str(caught.value)


async def test_an_identity_provider_that_is_down_is_waited_for(fortress: Fortress, prefix: str) -> None:
    sink = sink_of(oidc(fortress, f"http://127.0.0.1:{free_port()}/token"), connect_timeout=2)
    with pytest.raises(SinkUnavailable):
        await sink.open()
    await sink.close()


# --- wrong ones


def test_oauth_without_a_way_to_a_token_is_a_fault_of_the_configuration(fortress: Fortress) -> None:
    with pytest.raises(ConfigError, match="oidc"):
        sink_of(fortress.options("OAUTH"))


async def test_a_key_that_does_not_open_is_a_fault_of_the_configuration(fortress: Fortress) -> None:
    locked = fortress.authority.client("relay", password="another")
    sink = sink_of(fortress.options("MTLS", ssl_key_location=str(locked.key), ssl_key_password=SECRET))
    with pytest.raises(ConfigError, match=r"ssl\.key\.location") as caught:
        await sink.open()
    assert SECRET not in str(caught.value)


async def relay_of(database: Database, folder: Path, options: dict[str, Any]) -> Path:
    sink = {"kind": "kafka", "kafka": {"options": options, "connect_timeout": "20s"}}
    sections = {"source": {"slot": database.name}, "log": {"level": "debug"}}
    return await prepare(folder, settings(database.dsn, sink, **sections))


WRONG: dict[str, tuple[str, dict[str, Any], str]] = {
    "password": ("PLAIN", {"sasl_password": "hunter2-falsch"}, "Invalid username or password"),
    "scram": ("SCRAM", {"sasl_password": "hunter2-falsch"}, "invalid credentials"),
    "mechanism": ("PLAIN", {"sasl_mechanism": "SCRAM-SHA-256"}, "Unsupported SASL mechanism"),
    "ca": ("TLS", {"ssl_ca_location": "stranger"}, "certificate verify failed"),
    "no certificate": ("MTLS", {"ssl_certificate_location": None, "ssl_key_location": None}, "alert"),
    "certificate": ("MTLS", {"ssl_certificate_location": "stranger", "ssl_key_location": "stranger"}, "alert"),
}


@pytest.mark.parametrize("kind", WRONG)
async def test_wrong_credentials_are_one_clear_line(
    kind: str, fortress: Fortress, database: Database, tmp_path: Path, stranger: Authority
) -> None:
    listener, more, says = WRONG[kind]
    pair = stranger.client("relay")
    paths = {"ssl_ca_location": stranger.ca, "ssl_certificate_location": pair.cert, "ssl_key_location": pair.key}
    more = {name: str(paths[name]) if value == "stranger" else value for name, value in more.items()}
    path = await relay_of(database, tmp_path, fortress.options(listener, **more))
    await refused(path, says, [SECRET, "hunter2-falsch"])


async def test_secrets_show_nowhere_while_all_is_well(fortress: Fortress, database: Database, tmp_path: Path) -> None:
    locked = fortress.authority.client("relay", password=SECRET)
    files = {"ssl_certificate_location": str(locked.cert), "ssl_key_location": str(locked.key)}
    options = fortress.options("SCRAM", **files, ssl_key_password=SECRET)
    await accepted(await relay_of(database, tmp_path, options), [SECRET])
