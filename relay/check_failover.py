"""`relay check` on failover slots (PostgreSQL 17): would the slot survive a promotion, and not be ahead of the data?

On the primary: the slot's flag, and `synchronized_standby_slots`, which holds events back until a standby has them. On
each standby whose DSN is given: the settings that slot synchronisation needs, and whether the slot is there for good. A
synchronised slot that is still temporary is dropped by a promotion. Changes nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from pydantic import SecretStr

from relay.config import Config
from relay.errors import RelayError
from relay.finding import Finding, identifier
from relay.source.session import Session, connect
from relay.source.slot import ServerInfo, SlotInfo, fetch, server_info, slot_info

_FIRST = 170000
_RELOAD = "SELECT pg_reload_conf();"


async def failover_findings(
    session: Session, config: Config, server: ServerInfo, slot: SlotInfo | None, standbys: Sequence[str]
) -> list[Finding]:
    """Only asked with `source.failover = true`."""
    subject = "failover"
    if server.version_num < _FIRST:
        remedy = (
            "upgrade to PostgreSQL 17, or set source.failover = false: after a failover the gap is closed from the "
        )
        return [Finding("error", subject, f"PostgreSQL {server.version} has no failover slots", remedy + "table")]
    findings = []
    if slot is not None and not slot.failover:
        remedy = "stop the relay; then psql 'dbname=… replication=database' -c 'ALTER_REPLICATION_SLOT "
        remedy += f"{identifier(slot.name)} (FAILOVER true)'; or drop the slot: the relay makes it anew with the flag"
        findings.append(Finding("error", subject, f"the slot {slot.name} was made without it", remedy))
    elif slot is not None:
        findings.append(Finding("ok", subject, f"the slot {slot.name} is a failover slot"))
    findings += await _held_back(session)
    for dsn in standbys:
        findings += [each async for each in _standby(config, server, dsn)]
    if not standbys:
        text = "whether a standby has the slot is seen there: `relay check --standby DSN`"
        findings.append(Finding("ok", subject, text))
    return findings


async def _held_back(session: Session) -> list[Finding]:
    """Does the stream wait until a standby has what it brings?"""
    subject = "synchronized_standby_slots"
    ((names,),) = await fetch(
        session, "SELECT regexp_split_to_array(current_setting('synchronized_standby_slots'), '[ ,\"]+')"
    )
    rows = await fetch(session, "SELECT slot_name::text, active FROM pg_replication_slots WHERE slot_type = 'physical'")
    physical = dict(rows)
    wanted = [name for name in names if name]
    if not wanted:
        choice = next(iter(physical), "<the standby's primary_slot_name>")
        remedy = f"ALTER SYSTEM SET synchronized_standby_slots = '{choice}'; {_RELOAD}"
        text = "is empty: events may be published that a standby does not have when it is promoted"
        return [Finding("warning", subject, text, remedy)]
    findings = []
    for name in wanted:
        remedy = f"start the standby, or take {name} out: ALTER SYSTEM SET synchronized_standby_slots = …; {_RELOAD}"
        if name not in physical:
            text = f"names {name}, which is not a physical slot of this server: nothing is streamed"
            findings.append(Finding("error", subject, text, remedy))
        elif not physical[name]:
            text = f"names {name}, which no standby uses: nothing is streamed until one does"
            findings.append(Finding("error", subject, text, remedy))
    return findings or [Finding("ok", subject, f"events wait until {', '.join(wanted)} has them")]


async def _standby(config: Config, primary: ServerInfo, dsn: str) -> AsyncIterator[Finding]:
    database = config.database.model_copy(update={"dsn": SecretStr(dsn), "dsn_file": None})
    try:
        session = await connect(database, "relay check")
    except RelayError as exc:
        yield Finding("error", "standby", str(exc), exc.hint or "see that it runs, and that --standby is right")
        return
    async with session:
        server = await server_info(session)
        subject = f"standby {session.info.host}:{session.info.port}"
        if not server.in_recovery or server.system_identifier != primary.system_identifier:
            yield Finding("error", subject, "is not a standby of this primary", "give the DSN of one")
            return
        missing = await _settings(session)
        for name, wanted in missing.items():
            remedy = f"on the standby: ALTER SYSTEM SET {name} = {wanted}; {_RELOAD}"
            yield Finding("error", subject, f"{name} keeps slots from being synchronised", remedy)
        slot = await slot_info(session, config.source.slot)
    if slot is None or not slot.synced:
        remedy = "correct what is said above; otherwise wait a few seconds, and see the standby's log (slotsync worker)"
        what = "does not have the slot" if slot is None else "has a slot of that name that is its own: drop it there"
        yield Finding("error", subject, f"{what}: a promotion would lose it", remedy)
    elif slot.invalidation_reason or slot.wal_status == "lost":
        remedy = "the standby's log says why; it makes the slot anew when it can"
        yield Finding("error", subject, f"its copy of the slot is invalid: {slot.invalidation_reason}", remedy)
    elif slot.temporary:
        remedy = "wait until the relay has confirmed something newer than what the standby needs, then check again"
        yield Finding("warning", subject, "its copy of the slot is not for good yet: a promotion would drop it", remedy)
    else:
        yield Finding("ok", subject, f"has the slot, synchronised up to {slot.confirmed_flush_lsn}")


async def _settings(session: Session) -> dict[str, str]:
    """What slot synchronisation needs of a standby and this one lacks. What we may not see is not judged."""
    query = """
        SELECT name, setting FROM pg_settings
        WHERE name IN ('sync_replication_slots', 'hot_standby_feedback', 'primary_slot_name', 'primary_conninfo')
    """
    found = dict(await fetch(session, query))
    missing = {}
    for name in ("sync_replication_slots", "hot_standby_feedback"):
        if found.get(name) == "off":
            missing[name] = "on"
    if found.get("primary_slot_name") == "":
        missing["primary_slot_name"] = "'<a physical slot of the primary>'"
    if "primary_conninfo" in found and "dbname" not in found["primary_conninfo"]:
        missing["primary_conninfo"] = "'… dbname=postgres'"
    return missing
