"""Failover slots on a real standby: what `relay check` says before and after each remedy, and what a promotion does."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psycopg
import pytest

from relay.check import Finding, check
from relay.embedded import PostgresServer
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.relays import RelayProcess, config_of, eventually
from tests.scene import Scene, copy_of


def reload(server: PostgresServer, *settings: str) -> None:
    for each in settings:
        server.execute(f"ALTER SYSTEM SET {each}")
    server.execute("SELECT pg_reload_conf()")


def told(findings: list[Finding], level: str, *words: str) -> list[Finding]:
    return [
        each
        for each in findings
        if each.level == level and all(word in f"{each.subject} {each.message}" for word in words)
    ]


@pytest.mark.guarantee("G5")
@pytest.mark.timeout(240)
async def test_checked_and_promoted(own_postgres: PostgresServer, nats: Nats, prefix: str, tmp_path: Path) -> None:
    primary = own_postgres
    scene = await Scene(primary.dsn(), nats.url, prefix, tmp_path).set_up()
    with RelayProcess(scene.path) as relay:  # a slot from before it was asked for
        await relay.streaming()
        await relay.stopped()
    scene.configure(source={"failover": True})
    config = config_of(scene.sections)
    findings = await check(config, broker=False)
    (found,) = told(findings, "error", "was made without it")
    assert "ALTER_REPLICATION_SLOT" in found.remedy
    assert told(findings, "warning", "synchronized_standby_slots", "is empty")
    with psycopg.connect(primary.dsn(), replication="database", autocommit=True) as walsender:
        walsender.execute(f'ALTER_REPLICATION_SLOT "{prefix}" (FAILOVER true)'.encode())

    scene.execute("SELECT pg_create_physical_replication_slot('standby', true)")
    reload(primary, "synchronized_standby_slots = 'standby'")
    findings = await check(config, broker=False)
    assert told(findings, "ok", "is a failover slot")
    assert told(findings, "error", "which no standby uses")  # nothing would be streamed

    standby = await asyncio.to_thread(copy_of, primary, "-R")
    try:
        await asyncio.to_thread(standby.start)

        async def looked_at() -> list[Finding]:
            return await check(config, broker=False, standbys=[standby.dsn()])

        findings = await looked_at()
        for name in ("sync_replication_slots", "hot_standby_feedback", "primary_slot_name"):
            assert told(findings, "error", "standby 127.0.0.1", name), findings
        assert told(findings, "error", "does not have the slot")
        reload(standby, "hot_standby_feedback = on", "primary_slot_name = 'standby'", "sync_replication_slots = on")

        hosts = f"127.0.0.1:{primary.port},127.0.0.1:{standby.port}"
        both = f"postgresql://postgres@{hosts}/postgres?target_session_attrs=read-write"
        scene.configure(database={"dsn": both})
        with RelayProcess(scene.path) as relay:
            await relay.streaming()
            with scene.ledger.writing(writers=1, pause=0.1):  # the slot has to move on for its copy to become permanent
                async with asyncio.timeout(120):
                    while not told(findings := await looked_at(), "ok", "has the slot, synchronised"):
                        await asyncio.sleep(0.5)
            assert not [each for each in findings if each.level == "error"]
            assert told(findings, "ok", "events wait until standby has them")
            await scene.settled(relay)
            await scene.covered()

            def caught_up() -> bool:
                with psycopg.connect(standby.dsn(), autocommit=True) as connection:
                    row = connection.execute(
                        "SELECT s.confirmed_flush_lsn <= c.lsn AND s.synced AND NOT s.temporary"
                        " FROM pg_replication_slots s, outbox_relay_checkpoint c WHERE slot_name = %s",
                        (prefix,),
                    ).fetchone()
                return row is not None and bool(row[0])

            await eventually(caught_up, "the standby has the checkpoint")
            streams = len(relay.said("stream.started"))
            primary.stop(mode="immediate")
            standby.execute("SELECT pg_promote()")
            scene.dsn = scene.ledger.dsn = standby.dsn()
            await relay.says_again("stream.started", streams)
            scene.ledger.write(10, seed=2)
            # The base backup brought the setting along, and nobody uses the slot that it names: all stands still.
            (found,) = told(await check(config_of(scene.sections), broker=False), "error", "nothing is streamed")
            assert "synchronized_standby_slots" in found.remedy
            reload(standby, "synchronized_standby_slots = ''")
            await scene.settled(relay)
            assert not relay.said("slot.created")
            await relay.stopped()
    finally:
        standby.close()


async def test_refused_before_17(database16: Database, prefix: str) -> None:
    config = config_of({"database": {"dsn": database16.dsn}, "source": {"slot": prefix, "failover": True}})
    assert told(await check(config, broker=False), "error", "has no failover slots")


async def test_a_server_that_is_no_standby(database: Database, prefix: str) -> None:
    config = config_of({"database": {"dsn": database.dsn}, "source": {"slot": prefix, "failover": True}})
    assert told(await check(config, broker=False, standbys=[database.dsn]), "error", "is not a standby")
    nobody = "postgresql://postgres@127.0.0.1:1/postgres"
    assert told(await check(config, broker=False, standbys=[nobody]), "error", "standby")
