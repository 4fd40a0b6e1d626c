"""`relay takeover` and `relay adopt-timeline`: the operator's two decisions on who runs, and on which server."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from relay.config import Config
from relay.errors import AuthError, SetupError, SlotBusy
from relay.takeover import takeover
from relay.timeline import adopt_timeline
from tests.fix_nats import Nats
from tests.fix_postgres import Database
from tests.ledger import Ledger
from tests.relays import RelayProcess, config_of, eventually, jetstream, prepare, settings
from tests.sinks import read_jetstream


@pytest.fixture
def sections(database: Database, nats: Nats, prefix: str) -> dict[str, Any]:
    return settings(database.dsn, jetstream(nats.url, prefix), source={"slot": prefix})


_UNCOVERED = """
    SELECT count(*) FROM outbox_events, outbox_relay_checkpoint WHERE NOT pg_visible_in_snapshot(xid, snap)
"""


@pytest.mark.guarantee("G6")
async def test_a_takeover_makes_the_stand_by_active_and_the_other_one_stand_by(
    tmp_path: Path, database: Database, sections: dict[str, Any], nats: Nats, prefix: str
) -> None:
    path = await prepare(tmp_path, sections)
    ledger = Ledger(database.dsn, f"{prefix}.orders")
    assert await takeover(config_of(sections)) == []
    with RelayProcess(path) as first:
        await first.streaming()
        with RelayProcess(path) as second:
            await second.says("relay.standing_by")
            ledger.write(20)

            ended = await takeover(config_of(sections))

            assert {each.role for each in ended} == {"lock", "stream"}
            await second.streaming()
            await first.says("relay.standing_by")
            ledger.write(20, seed=2)
            ledger.check(await ledger.arrived(lambda: read_jetstream(nats.url, prefix), second), duplicates=40)
            await second.stopped()
            await first.streaming()
        await first.stopped()


@pytest.mark.parametrize("name", ["database15", "database"])
async def test_a_takeover_without_the_right_to_it_says_which_one(
    request: pytest.FixtureRequest, prefix: str, name: str
) -> None:
    database: Database = request.getfixturevalue(name)
    lock = "SELECT pg_try_advisory_lock(hashtextextended('outbox_relay:outbox_relay', 0))"
    database.execute(f"CREATE ROLE {prefix}a LOGIN; CREATE ROLE {prefix}b LOGIN")
    config = Config.model_validate({"database": {"dsn": database.dsn_for(f"{prefix}b")}, "source": {"slot": prefix}})
    try:
        with closing(psycopg.connect(database.dsn, autocommit=True)) as relay:
            relay.execute(lock.encode())
            with pytest.raises(AuthError) as refused:
                await takeover(config)
            assert "as a superuser" in refused.value.hint
        with closing(psycopg.connect(database.dsn_for(f"{prefix}a"), autocommit=True)) as relay:
            await eventually(lambda: relay.execute(lock.encode()).fetchone() == (True,), "the lock is free")
            with pytest.raises(AuthError) as refused:
                await takeover(config)
            database.execute(refused.value.hint)
            assert [each.role for each in await takeover(config)] == ["lock"]
    finally:
        database.execute(f"DROP ROLE {prefix}a, {prefix}b")


async def test_a_running_relay_is_not_adopted(tmp_path: Path, sections: dict[str, Any]) -> None:
    with RelayProcess(await prepare(tmp_path, sections)) as relay:
        await relay.streaming()
        with pytest.raises(SlotBusy, match="is running"):
            await adopt_timeline(config_of(sections), "checkpoint")
        await relay.stopped()


async def test_without_a_checkpoint_there_is_nothing_to_adopt(tmp_path: Path, sections: dict[str, Any]) -> None:
    await prepare(tmp_path, sections)
    with pytest.raises(SetupError, match="no checkpoint"):
        await adopt_timeline(config_of(sections), "checkpoint")


@pytest.mark.parametrize("published", ["checkpoint", "nothing", "everything"])
async def test_on_its_own_server_there_is_nothing_to_adopt(
    tmp_path: Path, database: Database, sections: dict[str, Any], prefix: str, published: Any
) -> None:
    """What was written while the relay was down is pending; nobody may call it published."""
    path = await prepare(tmp_path, sections)
    with RelayProcess(path) as relay:
        await relay.streaming()
        await relay.stopped()
    database.execute(f"INSERT INTO outbox_events (topic, aggregate_id, payload) VALUES ('{prefix}.a', 'k', '{{}}')")
    row = "SELECT to_jsonb(c) - 'snap' || jsonb_build_object('snap', snap::text) FROM outbox_relay_checkpoint c"
    before = database.query(row)

    with pytest.raises(SetupError, match="nothing to adopt: the checkpoint is of this server"):
        await adopt_timeline(config_of(sections), published)

    assert database.query(row) == before
    with RelayProcess(path) as relay:
        await relay.has_published(1)
        await relay.stopped()


@pytest.mark.parametrize("moved", ["system_identifier = '1'", "timeline = 7", "lsn = 'FFFFFFFF/0'"])
async def test_what_another_server_wrote_is_adopted_and_may_be_decided_anew_until_the_relay_has_run(
    tmp_path: Path, database: Database, sections: dict[str, Any], moved: str
) -> None:
    path = await prepare(tmp_path, sections)
    with RelayProcess(path) as relay:
        await relay.streaming()
        await relay.stopped()
    database.execute(f"UPDATE outbox_relay_checkpoint SET {moved}")
    await adopt_timeline(config_of(sections), "everything")
    assert (await adopt_timeline(config_of(sections), "nothing")).snapshot == "3:3:"
    with RelayProcess(path) as relay:
        await relay.streaming()
        await relay.stopped()
    with pytest.raises(SetupError, match="nothing to adopt"):
        await adopt_timeline(config_of(sections), "everything")


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(("published", "again"), [("checkpoint", 0), ("nothing", 20), ("everything", 0)])
async def test_a_checkpoint_of_another_server_stops_the_relay_until_the_operator_decides(
    tmp_path: Path, database: Database, sections: dict[str, Any], nats: Nats, prefix: str, published: Any, again: int
) -> None:
    path = await prepare(tmp_path, sections)
    database.execute(
        "INSERT INTO outbox_events (topic, aggregate_id, payload) SELECT %s, 'k', '{}' FROM "
        "generate_series(1, 20)".replace("%s", f"'{prefix}.a'")
    )
    with RelayProcess(path) as relay:
        await relay.has_published(20)
        await relay.streaming()
        await eventually(lambda: database.query(_UNCOVERED) == [(0,)], "the checkpoint's snapshot covers them")
        await relay.stopped()
    database.execute("UPDATE outbox_relay_checkpoint SET system_identifier = '1'")
    with RelayProcess(path) as relay:
        await relay.refuses(3, "another server")

    await adopt_timeline(config_of(sections), published)

    with RelayProcess(path) as relay:
        await relay.streaming()
        database.execute(f"INSERT INTO outbox_events (topic, aggregate_id, payload) VALUES ('{prefix}.a', 'k', '{{}}')")
        await relay.has_published(again + 1)
        await eventually(lambda: relay.counter("published_events") == again + 1, "what was decided")
        await relay.stopped()


async def test_a_snapshot_from_the_future_is_never_believed(
    tmp_path: Path, database: Database, sections: dict[str, Any]
) -> None:
    """Believed, it would hide every event that is written until the server's ids get there."""
    with RelayProcess(await prepare(tmp_path, sections)) as relay:
        await relay.streaming()
        await relay.stopped()
    database.execute("UPDATE outbox_relay_checkpoint SET snap = '90000000:90000000:', system_identifier = '1'")
    with pytest.raises(SetupError, match="ahead of this server"):
        await adopt_timeline(config_of(sections), "checkpoint")
    adopted = await adopt_timeline(config_of(sections), "nothing")
    assert adopted.snapshot == "3:3:"
