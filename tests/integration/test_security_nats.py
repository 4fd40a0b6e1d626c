"""NATS with its doors locked: every kind of credential opens them, a wrong one is one clear line, no secret shows."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets as randomness
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nkeys
import pytest

from relay.config import JetStream
from relay.embedded import NatsCluster, NatsServer
from relay.embedded.process import free_port
from relay.errors import AuthError, ConfigError, SetupError, TransientError
from relay.sink.jetstream import JetStreamSink
from tests.certificates import LOCAL, Authority
from tests.fix_postgres import Database
from tests.refusals import accepted, refused
from tests.relays import jetstream, prepare, settings
from tests.sinks import batch_of, make_event

StartNats = Callable[..., NatsServer]
SECRET = "hunter2/Geheim@3"  # with what must be escaped in a URL
ESCAPED = "hunter2%2FGeheim%403"
STREAM = {"mode": "shared", "streams": [{"name": "S", "subjects": ["s.>"], "create": True}]}


async def publishes(url: str, **options: Any) -> None:
    """The sink opens, and an event is acknowledged."""
    sink = JetStreamSink(JetStream.model_validate({"servers": [url], **STREAM, **options}))
    try:
        await sink.open()
        assert await sink.publish(batch_of([make_event(1, topic="s.x")])) == []
    finally:
        await sink.close()


# --- keys and JWTs, as `nsc` makes them


class Key(NamedTuple):
    seed: str
    public: str

    @classmethod
    def of(cls, prefix: int) -> Key:
        seed = nkeys.encode_seed(randomness.token_bytes(32), prefix)
        return cls(seed.decode(), nkeys.from_seed(bytearray(seed)).public_key.decode())

    def signed(self, subject: Key, kind: str, *, exp: int = 0, **claims: Any) -> str:
        nats = {"type": kind, "version": 2, **claims}
        body = {"jti": randomness.token_hex(8), "iat": 1, "iss": self.public, "sub": subject.public, "nats": nats}
        body |= {"exp": exp} if exp else {}
        text = ".".join(_part(json.dumps(each).encode()) for each in ({"typ": "JWT", "alg": "ed25519-nkey"}, body))
        return f"{text}.{_part(nkeys.from_seed(bytearray(self.seed.encode())).sign(text.encode()))}"


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Operator:
    """An operator with a system account and an account of ours; `creds` makes users of it."""

    def __init__(self) -> None:
        operator, system, self._account = (
            Key.of(nkeys.PREFIX_BYTE_OPERATOR),
            Key.of(nkeys.PREFIX_BYTE_ACCOUNT),
            Key.of(nkeys.PREFIX_BYTE_ACCOUNT),
        )
        unlimited = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
        storage = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), -1)
        plain = operator.signed(system, "account", limits=unlimited)
        ours = operator.signed(self._account, "account", limits={**unlimited, **storage, "wildcards": True})
        self.config = "\n".join(
            [
                f"operator: {operator.signed(operator, 'operator', system_account=system.public)}",
                f"system_account: {system.public}",
                "resolver: MEMORY",
                f"resolver_preload: {{ {system.public}: {plain}, {self._account.public}: {ours} }}",
            ]
        )

    def creds(self, path: Path, **claims: Any) -> tuple[Path, str]:
        """The file, and the seed in it."""
        user = Key.of(nkeys.PREFIX_BYTE_USER)
        jwt = self._account.signed(user, "user", pub={}, sub={}, subs=-1, data=-1, payload=-1, **claims)
        path.write_text(
            f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n"
            f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
        )
        return path, user.seed


def written(path: Path, text: str) -> Path:
    path.write_text(f"{text}\n")
    return path


def tls_block(authority: Authority, *, verify: bool = False, names: Sequence[str] = LOCAL) -> str:
    server = authority.server(f"nats-{'-'.join(names)}", names)
    files = f'cert_file: "{server.cert}", key_file: "{server.key}", ca_file: "{authority.ca}"'
    return f"tls {{ {files}, verify: {str(verify).lower()}, timeout: 5 }}"


# --- right ones


async def test_user_and_password(start_nats: StartNats, tmp_path: Path) -> None:
    server = start_nats(f'authorization {{ user: "relay", password: "{SECRET}" }}')
    await publishes(server.url, user="relay", password=SECRET)
    await publishes(server.url, user="relay", password_file=str(written(tmp_path / "p", SECRET)))
    await publishes(server.url.replace("//", f"//relay:{ESCAPED}@"))


async def test_token(start_nats: StartNats, tmp_path: Path) -> None:
    server = start_nats(f'authorization {{ token: "{SECRET}" }}')
    await publishes(server.url, token=SECRET)
    await publishes(server.url, token_file=str(written(tmp_path / "t", SECRET)))
    await publishes(server.url.replace("//", f"//{ESCAPED}@"))


async def test_nkey(start_nats: StartNats, tmp_path: Path) -> None:
    key = Key.of(nkeys.PREFIX_BYTE_USER)
    server = start_nats(f"authorization {{ users: [ {{ nkey: {key.public} }} ] }}")
    await publishes(server.url, nkey_seed_file=str(written(tmp_path / "seed", key.seed)))


async def test_credentials_file(start_nats: StartNats, tmp_path: Path) -> None:
    operator = Operator()
    server = start_nats(operator.config)
    await publishes(server.url, credentials_file=str(operator.creds(tmp_path / "relay.creds")[0]))


async def test_tls_by_either_scheme(start_nats: StartNats, authority: Authority) -> None:
    server = start_nats(tls_block(authority))
    await publishes(server.url, tls={"ca": str(authority.ca)})
    await publishes(server.url.replace("nats://", "tls://"), tls={"ca": str(authority.ca)})


async def test_a_certificate_that_is_made_out_to_another_name(start_nats: StartNats, authority: Authority) -> None:
    server = start_nats(tls_block(authority, names=("nats.example",)))
    with pytest.raises(AuthError, match="IP address mismatch"):
        await publishes(server.url, tls={"ca": str(authority.ca)})
    await publishes(server.url, tls={"ca": str(authority.ca), "hostname": "nats.example"})


async def test_client_certificate_with_a_password_besides(start_nats: StartNats, authority: Authority) -> None:
    server = start_nats(f'{tls_block(authority, verify=True)}\nauthorization {{ user: "relay", password: "{SECRET}" }}')
    client = authority.client("relay")
    tls = {"ca": str(authority.ca), "cert": str(client.cert), "key": str(client.key)}
    await publishes(server.url, tls=tls, user="relay", password=SECRET)


async def publishes_at_last(sink: JetStreamSink) -> None:
    """As soon as the servers that are left have elected their leaders; a refusal is no reason to wait."""
    async with asyncio.timeout(60):
        while True:
            try:
                await sink.open()
                await sink.publish(batch_of([make_event(1, topic="s.x")]))
            except TransientError:
                await asyncio.sleep(0.1)
            else:
                return


async def test_a_cluster_with_one_server_down(authority: Authority) -> None:
    block = f'{tls_block(authority)}\nauthorization {{ user: "relay", password: "{SECRET}" }}'
    with NatsCluster(config=block) as cluster:
        cluster.nodes[0].stop()
        urls = [url.replace("nats://", f"tls://relay:{ESCAPED}@") for url in cluster.urls]
        config = JetStream.model_validate({"servers": urls, "tls": {"ca": authority.ca}, **STREAM})
        for _ in range(3):  # the sink tries them in a random order
            sink = JetStreamSink(config)
            try:
                await publishes_at_last(sink)
            finally:
                await sink.close()


async def test_servers_that_the_cluster_names_take_the_credentials_of_the_url() -> None:
    with NatsCluster(config=f'authorization {{ user: "relay", password: "{SECRET}" }}') as cluster:
        url = cluster.urls[0].replace("//", f"//relay:{ESCAPED}@")
        streams = [{"name": "S", "subjects": ["s.>"], "create": True, "replicas": 3}]
        sink = JetStreamSink(JetStream.model_validate({"servers": [url], "mode": "shared", "streams": streams}))
        try:
            await publishes_at_last(sink)
            cluster.nodes[0].kill()
            await publishes_at_last(sink)
        finally:
            await sink.close()


# --- wrong ones


async def test_no_credentials_are_sent_to_a_server_without_tls() -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def listen(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b'INFO {"server_id":"x","max_payload":1048576,"auth_required":true,"headers":true}\r\n')
        with contextlib.suppress(ConnectionError):
            heard.put_nowait(await reader.read(4096))
        writer.transport.abort()

    port = free_port()
    async with await asyncio.start_server(listen, "127.0.0.1", port):
        for url in (f"tls://relay:{ESCAPED}@127.0.0.1:{port}", f"tls://{ESCAPED}@127.0.0.1:{port}"):
            with pytest.raises(SetupError, match="does not use TLS"):
                await publishes(url)
            assert await heard.get() == b""


@pytest.mark.parametrize("content", ["", "no creds at all", "-----BEGIN NATS USER JWT-----\nx\n"])
async def test_a_file_that_holds_no_credentials(own_nats: NatsServer, tmp_path: Path, content: str) -> None:
    with pytest.raises(ConfigError, match="is no"):
        await publishes(own_nats.url, credentials_file=str(written(tmp_path / "relay.creds", content)))


async def test_a_seed_that_is_none(start_nats: StartNats, tmp_path: Path) -> None:
    server = start_nats(f"authorization {{ users: [ {{ nkey: {Key.of(nkeys.PREFIX_BYTE_USER).public} }} ] }}")
    with pytest.raises(AuthError, match="cannot use the credentials"):
        await publishes(server.url, nkey_seed_file=str(written(tmp_path / "seed", "SUAhunter2")))


async def relay_of(database: Database, folder: Path, url: str, **options: Any) -> Path:
    sections = {"source": {"slot": database.name}, "log": {"level": "debug"}}
    return await prepare(folder, settings(database.dsn, jetstream(url, "S", **options), **sections))


WRONG = ["password", "password in the URL", "token", "nkey", "credentials", "expired", "ca", "no certificate"]


@pytest.mark.parametrize("kind", WRONG)
async def test_wrong_credentials_are_one_clear_line(
    kind: str, start_nats: StartNats, database: Database, tmp_path: Path, authority: Authority, stranger: Authority
) -> None:
    secret, says, options = SECRET, "refuses the credentials", dict[str, Any]()
    config, operator = 'authorization { user: "relay", password: "another" }', Operator()
    if kind == "password":
        options = {"user": "relay", "password": SECRET}
    elif kind == "token":
        config = 'authorization { token: "another" }'
        options = {"token_file": written(tmp_path / "t", SECRET)}
    elif kind == "nkey":
        config = f"authorization {{ users: [ {{ nkey: {Key.of(nkeys.PREFIX_BYTE_USER).public} }} ] }}"
        secret = Key.of(nkeys.PREFIX_BYTE_USER).seed
        options = {"nkey_seed_file": written(tmp_path / "seed", secret)}
    elif kind in ("credentials", "expired"):
        config = operator.config
        issuer = Operator() if kind == "credentials" else operator
        path, secret = issuer.creds(tmp_path / "relay.creds", **({"exp": 2} if kind == "expired" else {}))
        options = {"credentials_file": path}
    elif kind == "ca":
        config, says, options = tls_block(authority), "certificate verify failed", {"tls": {"ca": stranger.ca}}
    elif kind == "no certificate":
        config, says, options = tls_block(authority, verify=True), "client certificate", {"tls": {"ca": authority.ca}}
    server = start_nats(config)
    url = server.url.replace("//", f"//relay:{ESCAPED}@") if kind == "password in the URL" else server.url
    path = await relay_of(database, tmp_path, url, **options)
    await refused(path, says, [secret, ESCAPED])


async def test_secrets_show_nowhere_while_all_is_well(
    start_nats: StartNats, database: Database, tmp_path: Path, authority: Authority
) -> None:
    server = start_nats(f'{tls_block(authority)}\nauthorization {{ user: "relay", password: "{SECRET}" }}')
    url = server.url.replace("nats://", f"tls://relay:{ESCAPED}@")
    path = await relay_of(database, tmp_path, url, tls={"ca": authority.ca})
    await accepted(path, [SECRET, ESCAPED, "hunter2"])
