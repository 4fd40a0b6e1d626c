"""The JetStream sink on real servers: what the conformance suite does not cover."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import nkeys
import pytest
from nats.js import JetStreamContext
from nats.js.api import DiscardPolicy, StreamConfig, StreamSource

from relay.config import JetStream, Stream, Tls
from relay.embedded import NatsCluster, NatsServer
from relay.embedded.process import wait_until
from relay.errors import AuthError, ConfigError, SetupError, SinkUnavailable
from relay.event import Event
from relay.sink.jetstream import JetStreamSink
from relay.sink.nats_tap import Tap
from tests.fix_nats import Nats
from tests.sinks import (
    batch_of,
    batches_of,
    first_occurrences,
    make_event,
    order_per_key,
    publish_as_pipeline,
    publish_overlapping,
    read_jetstream,
)

USERS = "authorization { users: [ {user: relay, password: secret} ] }"


def configured(url: str, prefix: str, **changes: Any) -> JetStream:
    streams = (Stream(name=prefix, subjects=(f"{prefix}.>",), create=True),)
    return JetStream(**{"servers": (url,), "streams": streams, "ack_timeout": 10.0, "mode": "shared", **changes})


@asynccontextmanager
async def opened(config: JetStream, **changes: Any) -> AsyncIterator[JetStreamSink]:
    sink = JetStreamSink(config, **changes)
    try:
        await sink.open()
        yield sink
    finally:
        await sink.close()


@asynccontextmanager
async def jetstream(url: str, **options: Any) -> AsyncIterator[JetStreamContext]:
    client = await nats.connect(url, **options)
    try:
        yield client.jetstream()
    finally:
        await client.close()


async def refused(config: JetStream) -> Exception:
    """What open() raises."""
    sink = JetStreamSink(config)
    with pytest.raises((SetupError, AuthError, SinkUnavailable, ConfigError)) as caught:
        await sink.open()
    await sink.close()
    return caught.value


def events(topic: str, count: int, keys: int = 10, first: int = 0) -> list[Event]:
    return [make_event(seq, topic=topic, key=b"k%d" % (seq % keys)) for seq in range(first, first + count)]


# --- publishing


@pytest.mark.guarantee("G3")
async def test_headers_of_an_event(nats: Nats, prefix: str) -> None:
    async with opened(configured(nats.url, prefix)) as sink:
        await sink.publish(batch_of([make_event(1, topic=f"{prefix}.a", headers={"100%": "ä b".encode()})]))
    (stored,) = await read_jetstream(nats.url, prefix)
    assert stored.headers["Nats-Msg-Id"] == stored.id
    assert stored.headers["100%"] == "ä b".encode()


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.guarantee("G2")
async def test_strict_order_has_one_event_of_a_key_on_the_wire(nats: Nats, prefix: str, direct: bool) -> None:
    """Also the way through nats-py's public API, which is taken where its transport is not TCP as we know it."""
    async with opened(configured(nats.url, prefix), direct=direct) as sink:
        most = 0
        assert sink._window is not None
        send = sink._window._connection.send

        def counted(frames: Any) -> None:
            nonlocal most
            send(frames)
            most = max(most, sink.on_the_wire)

        sink._window._connection.send = counted  # type: ignore[method-assign]
        assert await publish_overlapping(sink, batches_of(events(f"{prefix}.a", 1000, keys=7), 50)) == []
        assert 1 <= most <= 7
        assert sink.on_the_wire == 0
    stored = await read_jetstream(nats.url, prefix)
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 1000, 7)) for n in range(7)}


async def test_relaxed_order_stores_everything(nats: Nats, prefix: str) -> None:
    async with opened(configured(nats.url, prefix, ordering="relaxed")) as sink:
        made = events(f"{prefix}.a", 2000)
        assert await publish_overlapping(sink, batches_of(made, 100)) == []
    assert {item.id for item in await read_jetstream(nats.url, prefix)} == {event.id for event in made}


@pytest.mark.guarantee("G3")
async def test_duplicates_are_stored_once_and_counted(nats: Nats, prefix: str) -> None:
    async with opened(configured(nats.url, prefix)) as sink:
        made = events(f"{prefix}.a", 500)
        await publish_overlapping(sink, batches_of(made, 100))
        await publish_overlapping(sink, batches_of(made, 100))
        assert sink.duplicates == 500
        await sink.open()
        await sink.publish(batch_of(made[:1]))
        assert sink.duplicates == 501
    assert len(await read_jetstream(nats.url, prefix)) == 500


async def test_what_cannot_be_sent_is_rejected_and_the_connection_lives(
    start_nats: Callable[..., NatsServer], prefix: str
) -> None:
    server = start_nats("max_payload: 4096")
    async with opened(configured(server.url, prefix)) as sink:
        bad = [
            make_event(1, topic=f"{prefix}.a", key=b"1", body=b"x" * 4000),
            make_event(2, topic=f"{prefix}.a", key=b"2", headers={"h": b"a\r\nNats-Rollup: all"}),
            make_event(3, topic=f"{prefix}.a b", key=b"3"),
        ]
        fine = [make_event(4, topic=f"{prefix}.a", key=b"4"), make_event(5, topic=f"{prefix}.a", body=b"x" * 3700)]
        rejected = await sink.publish(batch_of([*bad, *fine]))
        assert [item.event for item in rejected] == bad
        assert ["max_payload" in rejected[0].reason, "line break" in rejected[1].reason] == [True, True]
        assert not await sink.publish(batch_of(events(f"{prefix}.a", 1, first=10)))
    assert {item.seq for item in await read_jetstream(server.url, prefix)} == {4, 5, 10}


@pytest.mark.guarantee("G9")
async def test_an_event_too_large_for_the_stream_is_rejected(nats: Nats, prefix: str) -> None:
    async with jetstream(nats.url) as js:
        await js.add_stream(StreamConfig(name=prefix, subjects=[f"{prefix}.>"], max_msg_size=1000))
    async with opened(configured(nats.url, prefix)) as sink:
        large = make_event(2, topic=f"{prefix}.a", body=b"x" * 1000)
        others = [make_event(seq, topic=f"{prefix}.a", key=key) for seq, key in ((1, b"k"), (3, b"k"), (4, b"other"))]
        rejected = await sink.publish(batch_of([others[0], large, *others[1:]]))
        assert [item.event.transaction.xid for item in rejected] == [2, 3]
        assert "10054" in rejected[0].reason
    assert {item.seq for item in await read_jetstream(nats.url, prefix)} == {1, 4}


# --- faults


async def test_a_full_stream_that_discards_new_events_is_transient(nats: Nats, prefix: str) -> None:
    async with jetstream(nats.url) as js:
        await js.add_stream(
            StreamConfig(name=prefix, subjects=[f"{prefix}.>"], max_msgs=100, discard=DiscardPolicy.NEW)
        )
        async with opened(configured(nats.url, prefix)) as sink:
            batches = batches_of(events(f"{prefix}.a", 150), 50)
            results = await asyncio.gather(*(sink.publish(batch) for batch in batches), return_exceptions=True)
            failed = [result for result in results if isinstance(result, BaseException)]
            assert failed
            assert all(isinstance(failure, SinkUnavailable) for failure in failed)
            assert "10077" in str(failed[0])
            left = [event for batch, result in zip(batches, results, strict=True) for event in batch.events if result]
            assert len(left) >= 50
            await js.purge_stream(prefix)
            await sink.open()
            assert await publish_overlapping(sink, [batch_of(left)]) == []


@pytest.mark.guarantee("G1")
async def test_a_frozen_server_is_noticed_by_its_silence(own_nats: NatsServer, prefix: str) -> None:
    async with opened(configured(own_nats.url, prefix, ack_timeout=3.0, connect_timeout=3.0)) as sink:
        made = events(f"{prefix}.a", 60)
        await sink.publish(batch_of(made[:20]))
        own_nats.freeze()
        try:
            batches = [batch_of(made[20:40]), batch_of(made[40:])]
            results = await asyncio.gather(*(sink.publish(batch) for batch in batches), return_exceptions=True)
            assert [type(result) for result in results] == [SinkUnavailable, SinkUnavailable]
            assert "no acknowledgement" in str(results[0])
            with pytest.raises(SinkUnavailable):
                await sink.open()
        finally:
            own_nats.thaw()
        await sink.open()
        assert await publish_overlapping(sink, batches) == []
    stored = await read_jetstream(own_nats.url, prefix)
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 60, 10)) for n in range(10)}


@pytest.mark.guarantee("G2")
async def test_a_killed_server_keeps_the_order_and_stores_each_event_once(own_nats: NatsServer, prefix: str) -> None:
    made = events(f"{prefix}.a", 20_000, keys=50)
    async with opened(configured(own_nats.url, prefix)) as sink:
        rounds = 0
        async with asyncio.TaskGroup() as group:
            async for rejected in publish_as_pipeline(sink, batches_of(made, 200), window=10):
                assert rejected == []
                rounds += 1
                if rounds in {2, 5}:

                    def break_it() -> None:
                        own_nats.kill()
                        own_nats.restart()

                    group.create_task(asyncio.to_thread(break_it))
    stored = await read_jetstream(own_nats.url, prefix)
    assert len(stored) == len(made)  # all within the dedupe window
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 20_000, 50)) for n in range(50)}


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
async def test_a_cluster_loses_its_leader(nats_cluster: NatsCluster, prefix: str) -> None:
    """Only one server is configured; the others are known from what it told when it was still there."""
    streams = (Stream(name=prefix, subjects=(f"{prefix}.>",), create=True, replicas=3),)
    made = events(f"{prefix}.a", 4000, keys=20)
    async with opened(configured(nats_cluster.urls[0], prefix, streams=streams)) as sink:
        rounds = 0
        async for rejected in publish_as_pipeline(sink, batches_of(made, 50)):
            assert rejected == []
            rounds += 1
            if rounds == 3:
                nats_cluster.nodes[0].kill()
    # Reading makes a consumer, which the cluster may place on the dead node as long as it hopes for its return.
    await asyncio.to_thread(nats_cluster.nodes[0].restart)
    assert await asyncio.to_thread(wait_until, nats_cluster._complete, 90.0)
    stored = first_occurrences(await read_jetstream(nats_cluster.urls[1], prefix))
    assert order_per_key(stored) == {b"k%d" % n: list(range(n, 4000, 20)) for n in range(20)}


async def test_a_deleted_stream_is_named(nats: Nats, prefix: str) -> None:
    async with jetstream(nats.url) as js, opened(configured(nats.url, prefix)) as sink:
        await js.delete_stream(prefix)
        batch = batch_of(events(f"{prefix}.a", 1))
        with pytest.raises(SinkUnavailable, match=rf"{prefix}\.a.*no stream"):
            await sink.publish(batch)
        await sink.open()  # creates it again
        assert not await sink.publish(batch)


async def test_a_look_for_streams_that_is_cancelled_before_it_began_holds_nobody_up(nats: Nats, prefix: str) -> None:
    async with opened(configured(nats.url, prefix, streams=())) as sink:
        first, behind = (
            asyncio.ensure_future(sink.publish(batch_of([make_event(seq, topic=f"{prefix}.x")]))) for seq in (1, 2)
        )
        first.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(SinkUnavailable, match="interrupted"):
                await behind


async def test_acks_come_straight_from_the_socket(nats: Nats, prefix: str) -> None:
    """The short way leans on private parts of clients and loops: it must not end unnoticed with a new version."""
    async with opened(configured(nats.url, prefix)) as sink:
        connection = sink._connection
        assert connection is not None
        assert connection._wire is not None
        tap = connection._wire._io.get_protocol()
        assert isinstance(tap, Tap)
        short = 0
        for seq in range(10):  # now and then the server has something else to say
            passed = tap._passed
            assert not await sink.publish(batch_of([make_event(seq, topic=f"{prefix}.x")]))
            short += tap._passed == passed
        assert short


# --- streams


async def test_streams_are_created_as_configured(nats: Nats, prefix: str) -> None:
    streams = (
        Stream(name=prefix, subjects=(f"{prefix}.>",), create=True, max_age=60.0, duplicate_window=300.0),
        Stream(name=f"{prefix}2", subjects=(f"{prefix}2.*", f"{prefix}3"), create=True, duplicate_window=30.0),
    )
    async with opened(configured(nats.url, prefix, streams=streams)), jetstream(nats.url) as js:
        one, two = (await js.stream_info(prefix)).config, (await js.stream_info(f"{prefix}2")).config
    assert (one.storage, one.max_age, one.duplicate_window, one.num_replicas) == ("file", 60, 60, 1)
    assert (two.subjects, two.max_age, two.duplicate_window) == ([f"{prefix}2.*", f"{prefix}3"], 0, 30)


@pytest.mark.parametrize(("mode", "window"), [("auto", 10), ("fenced", 10), ("shared", 120)])
async def test_a_fenced_stream_keeps_ids_only_as_long_as_its_waves_need_them(
    nats: Nats, prefix: str, mode: str, window: int
) -> None:
    streams = (Stream(name=prefix, subjects=(f"{prefix}.>",), create=True),)
    async with (
        opened(configured(nats.url, prefix, streams=streams, mode=mode, ack_timeout=5.0)),
        jetstream(nats.url) as js,
    ):
        assert (await js.stream_info(prefix)).config.duplicate_window == window


async def test_beside_a_stream_of_somebody_else_the_dedupe_window_is_the_usual_one(nats: Nats, prefix: str) -> None:
    """Then mode auto is shared, and only the ids keep repeats out."""
    names = (f"{prefix}1", f"{prefix}2")
    streams = tuple(Stream(name=name, subjects=(f"{name}.>",), create=True) for name in names)
    async with jetstream(nats.url) as js:
        await js.add_stream(name=names[1], subjects=[f"{names[1]}.>"])
        async with opened(configured(nats.url, prefix, streams=streams, mode="auto")):
            assert (await js.stream_info(names[0])).config.duplicate_window == 120


async def test_a_stream_that_cannot_be_created(nats: Nats, prefix: str) -> None:
    streams = (Stream(name=prefix, subjects=(f"{prefix}.>",), create=True, replicas=3),)
    assert "replicas" in str(await refused(configured(nats.url, prefix, streams=streams)))


@pytest.mark.parametrize("subjects", [(">",), ("$JS.>",)], ids=str)
async def test_settings_that_the_server_never_takes(nats: Nats, prefix: str, subjects: tuple[str, ...]) -> None:
    """Trying again would not help: it says 500, and means the request."""
    error = await refused(configured(nats.url, prefix, streams=(Stream(name=prefix, subjects=subjects, create=True),)))
    assert isinstance(error, SetupError) and error.hint
    assert f"stream {prefix} cannot be created" in str(error)


async def test_all_missing_streams_are_named_at_once(nats: Nats, prefix: str) -> None:
    streams = tuple(
        Stream(name=f"{prefix}{name}", subjects=(f"{prefix}.{name}",), create=name == "b") for name in ("a", "b", "c")
    )
    error = await refused(configured(nats.url, prefix, streams=streams))
    assert isinstance(error, SetupError)
    assert str(error) == f"streams {prefix}a, {prefix}c do not exist"
    for name in ("a", "c"):
        assert f"nats stream add {prefix}{name} --subjects '{prefix}.{name}' --defaults" in error.hint
    async with jetstream(nats.url) as context:
        assert not [
            each for each in await context.streams_info() if each.config.name == f"{prefix}b"
        ]  # nothing is made


async def test_a_subject_without_a_stream_names_those_that_there_are(nats: Nats, prefix: str) -> None:
    async with opened(configured(nats.url, prefix)) as sink:
        with pytest.raises(SetupError) as caught:
            await sink.publish(batch_of([make_event(1, topic=f"other{prefix}.a")]))
    assert (
        str(caught.value) == f"no stream for subject other{prefix}.a; the configured streams have {prefix}: {prefix}.>"
    )


async def test_a_stream_that_does_not_listen_on_a_configured_subject(nats: Nats, prefix: str) -> None:
    async with jetstream(nats.url) as js:
        await js.add_stream(StreamConfig(name=prefix, subjects=[f"{prefix}.a.*"]))
    error = await refused(configured(nats.url, prefix))
    assert isinstance(error, SetupError)
    assert f"does not listen on {prefix}.>" in str(error)


@pytest.mark.parametrize("trait", ["sealed", "mirror", "no_ack"])
async def test_streams_that_take_nothing_are_refused(nats: Nats, prefix: str, trait: str) -> None:
    async with jetstream(nats.url) as js:
        if trait == "mirror":
            await js.add_stream(StreamConfig(name=f"{prefix}o", subjects=[f"{prefix}.o"]))
            await js.add_stream(StreamConfig(name=prefix, mirror=StreamSource(name=f"{prefix}o")))
        else:
            settings = StreamConfig(name=prefix, subjects=[f"{prefix}.>"], no_ack=trait == "no_ack")
            await js.add_stream(settings)
            if trait == "sealed":
                await js.update_stream(settings, sealed=True)
    error = await refused(configured(nats.url, prefix))
    assert isinstance(error, SetupError)
    assert trait in str(error)


async def test_without_configured_streams_the_servers_own_are_used(own_nats: NatsServer, prefix: str) -> None:
    async with jetstream(own_nats.url) as js, opened(configured(own_nats.url, prefix, streams=())) as sink:
        await js.add_stream(StreamConfig(name=prefix, subjects=[f"{prefix}.a.>"]))  # after open: looked up again
        assert await publish_overlapping(sink, batches_of(events(f"{prefix}.a.b", 100), 10)) == []
        lost = batch_of(events(f"{prefix}.nowhere", 3))
        with pytest.raises(SetupError, match=rf"{prefix}\.nowhere.*{prefix}\.a\.>") as caught:
            await sink.publish(lost)
        assert "subjects" in caught.value.hint
        assert len(lost.events) == 3


async def test_an_account_without_jetstream(start_nats: Callable[..., NatsServer], prefix: str) -> None:
    server = start_nats("accounts { A { users: [ {user: a, password: a} ] } }")
    error = await refused(configured(server.url, prefix, user="a", password="a"))
    assert isinstance(error, SetupError)
    assert "JetStream" in str(error)


# --- credentials and rights


async def test_password_by_value_and_by_file(
    start_nats: Callable[..., NatsServer], prefix: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start_nats(USERS)
    (tmp_path / "password").write_text("secret\n")
    for right in ({"password": "secret"}, {"password_file": tmp_path / "password"}):
        async with opened(configured(server.url, prefix, user="relay", **right)) as sink:
            assert not await sink.publish(batch_of(events(f"{prefix}.a", 1)))
    for wrong in ({"user": "relay", "password": "guess"}, {}):
        error = await refused(configured(server.url, prefix, **wrong))
        assert isinstance(error, AuthError)
        assert "credentials" in str(error)
    missing = await refused(configured(server.url, prefix, user="relay", password_file=tmp_path / "none"))
    assert isinstance(missing, ConfigError)
    assert capfd.readouterr().err == ""


async def test_token(start_nats: Callable[..., NatsServer], prefix: str, tmp_path: Path) -> None:
    server = start_nats("authorization { token: s3cr3t }")
    (tmp_path / "token").write_text("s3cr3t\n")
    for right in ({"token": "s3cr3t"}, {"token_file": tmp_path / "token"}):
        async with opened(configured(server.url, prefix, **right)):
            pass
    assert isinstance(await refused(configured(server.url, prefix, token="guess")), AuthError)


async def test_nkey(start_nats: Callable[..., NatsServer], prefix: str, tmp_path: Path) -> None:
    seed = nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER)
    public = nkeys.from_seed(bytearray(seed)).public_key.decode()
    server = start_nats(f"authorization {{ users: [ {{nkey: {public}}} ] }}")
    (tmp_path / "seed").write_bytes(seed + b"\n")
    async with opened(configured(server.url, prefix, nkey_seed_file=tmp_path / "seed")):
        pass
    (tmp_path / "seed").write_text("nonsense\n")
    assert isinstance(await refused(configured(server.url, prefix, nkey_seed_file=tmp_path / "seed")), AuthError)


async def test_a_subject_that_may_not_be_published_to(start_nats: Callable[..., NatsServer], prefix: str) -> None:
    server = start_nats(
        f"authorization {{ users: [ {{user: a, password: a, permissions: {{"
        f'publish: ["$JS.API.>", "{prefix}.a"], subscribe: ["_INBOX.>"] }} }} ] }}'
    )
    async with opened(configured(server.url, prefix, user="a", password="a")) as sink:
        assert not await sink.publish(batch_of(events(f"{prefix}.a", 3)))
        batch = batch_of(events(f"{prefix}.secret", 3))
        with pytest.raises(AuthError, match=rf"{prefix}\.secret"):
            await sink.publish(batch)
        assert len(batch.events) == 3


@pytest.mark.parametrize(("right", "missing"), [("publish", "stream.info"), ("subscribe", "_inbox")])
async def test_rights_that_the_relay_needs(
    start_nats: Callable[..., NatsServer], prefix: str, right: str, missing: str
) -> None:
    server = start_nats(
        f"authorization {{ users: [ {{user: a, password: a, permissions: {{"
        f' {right}: {{ deny: ["$JS.API.>", "_INBOX.>"] }} }} }} ] }}'
    )
    error = await refused(configured(server.url, prefix, user="a", password="a", connect_timeout=1.0))
    assert isinstance(error, AuthError)
    assert missing in str(error)


async def test_tls(start_nats: Callable[..., NatsServer], prefix: str, tmp_path: Path) -> None:
    for name in ("server", "stranger"):
        subprocess.run(
            (
                *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
                *("-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1,DNS:broker.example"),
                *("-keyout", tmp_path / f"{name}.key", "-out", tmp_path / f"{name}.pem"),
            ),
            check=True,
            capture_output=True,
        )
    server = start_nats(f'tls {{ cert_file: "{tmp_path}/server.pem", key_file: "{tmp_path}/server.key" }}')
    url = server.url.replace("nats:", "tls:")
    for tls in (Tls(ca=tmp_path / "server.pem"), Tls(ca=tmp_path / "server.pem", hostname="broker.example")):
        async with opened(configured(url, prefix, tls=tls)) as sink:
            assert await publish_overlapping(sink, batches_of(events(f"{prefix}.a", 2000), 100)) == []
    for tls in (Tls(ca=tmp_path / "stranger.pem"), Tls(ca=tmp_path / "server.pem", hostname="other.example")):
        assert isinstance(await refused(configured(url, prefix, tls=tls)), AuthError)
    assert isinstance(await refused(configured(url, prefix, tls=Tls(ca=tmp_path / "none"))), ConfigError)
    plain = start_nats()
    error = await refused(configured(plain.url.replace("nats:", "tls:"), prefix))
    assert isinstance(error, SetupError)
    assert "TLS" in str(error)


async def test_the_next_server_is_tried(nats: Nats, start_nats: Callable[..., NatsServer], prefix: str) -> None:
    dead = start_nats()
    dead.kill()
    async with opened(configured(nats.url, prefix, servers=(dead.url, nats.url))):
        pass
    error = await refused(configured(dead.url, prefix, servers=(dead.url,)))
    assert isinstance(error, SinkUnavailable)
    assert "cannot connect" in str(error)
    assert "\n" not in str(error)
