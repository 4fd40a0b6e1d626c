"""What a replay is asked for, and the selection that it becomes: a point (LSN, time, bookmark) turned into snapshots.

It refuses what contradicts itself or cannot be served, all of it at once, and never takes a later point than the one
that was asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from relay import bookmark
from relay.anchor import Bounds, exact_window
from relay.config import Config
from relay.errors import ConfigError
from relay.history import Known, Point, end, known_points, parse_lsn, parse_time, start
from relay.source.selection import Selection
from relay.source.session import Session


@dataclass(frozen=True, slots=True)
class Wish:
    """What the command line asks for; see `relay replay --help`."""

    from_lsn: str | None = None
    since: str | None = None
    bookmark: str | None = None
    seq: int | None = None
    to_lsn: str | None = None
    until: str | None = None
    to_bookmark: str | None = None
    to_seq: int | None = None
    key: str | None = None
    ids: tuple[str, ...] = ()
    table: str | None = None
    topic: str | None = None
    rate: float | None = None
    exact: bool = False


def check_wish(wish: Wish) -> None:
    """Raises ConfigError with every contradiction. Pure."""
    faults = []
    starts = {"--from-lsn": wish.from_lsn, "--since": wish.since, "--bookmark": wish.bookmark, "--seq": wish.seq}
    ends = {"--to-lsn": wish.to_lsn, "--until": wish.until, "--to-bookmark": wish.to_bookmark, "--to-seq": wish.to_seq}
    begins = [name for name, value in starts.items() if value is not None]
    stops = [name for name, value in ends.items() if value is not None]
    if len(begins) > 1:
        faults.append(f"{' and '.join(begins)}: give one beginning")
    if len(stops) > 1:
        faults.append(f"{' and '.join(stops)}: give one end")
    if wish.ids and (begins or stops or wish.key is not None):
        faults.append("--id stands alone")
    if not begins and not wish.ids and wish.key is None:
        faults.append("say what to replay: --from-lsn, --since, --bookmark, --seq, --key or --id")
    if wish.exact and (wish.ids or wish.seq is not None or wish.to_seq is not None or not begins):
        faults.append("--exact needs --from-lsn, --since or --bookmark, and knows no --seq and no --id")
    for name, value in (("--seq", wish.seq), ("--to-seq", wish.to_seq)):
        if value is not None and not -(2**63) <= value < 2**63:
            faults.append(f"{name} is beyond what a bigint can be")
    now = datetime.now(UTC)
    for text in (wish.from_lsn, wish.to_lsn):
        faults += _unreadable(parse_lsn, text) if text is not None else []
    for text in (wish.since, wish.until):
        faults += _unreadable(lambda at: parse_time(at, now), text) if text is not None else []
    if wish.since is not None and not faults and parse_time(wish.since, now) > now:
        faults.append(f"--since {wish.since} is in the future")
    if wish.seq is not None and wish.to_seq is not None and wish.to_seq < wish.seq:
        faults.append("--to-seq is before --seq")
    if wish.topic is not None and not wish.topic:
        faults.append("--topic is empty: leave it out to publish where the events were published")
    if wish.rate is not None and not wish.rate > 0:
        faults.append("--rate must be more than 0")
    if faults:
        raise ConfigError(faults, hint="docs/replay.md has examples")


def _unreadable(parse: Callable[[str], object], text: str) -> list[str]:
    try:
        parse(text)
    except ConfigError as exc:
        return exc.faults
    return []


async def resolve(session: Session, config: Config, wish: Wish) -> Selection:
    """The wish as snapshots; raises SetupError for a window that cannot be served."""
    check_wish(wish)
    name, now = config.relay.name, datetime.now(UTC)
    known = await known_points(session, name)
    if wish.exact:
        return await _exactly(session, config, known, wish)
    since: str | None = None
    if wish.from_lsn is not None:
        since = start(known, lsn=parse_lsn(wish.from_lsn)).snap
    elif wish.since is not None:
        since = start(known, at=parse_time(wish.since, now)).snap
    elif wish.bookmark is not None:
        since = (await bookmark.find(session, name, wish.bookmark)).snap
    until = known.now.snap
    if wish.to_lsn is not None:
        until = end(known, lsn=parse_lsn(wish.to_lsn)).snap
    elif wish.until is not None:
        until = end(known, at=parse_time(wish.until, now)).snap
    elif wish.to_bookmark is not None:
        until = (await bookmark.find(session, name, wish.to_bookmark)).snap
    return Selection(
        until=until,
        since=since,
        first_seq=wish.seq,
        last_seq=wish.to_seq,
        key=wish.key,
        ids=wish.ids or None,
        table=_table(config, wish),
        topic=wish.topic,
        rate=wish.rate,
        claimed=known.claimed,
    )


async def _exactly(session: Session, config: Config, known: Known, wish: Wish) -> Selection:
    if not config.source.anchor.slot:
        raise ConfigError(
            ["--exact: there is no anchor slot to read from"],
            hint="source.anchor.slot names one; it holds what is published from then on (docs/replay.md)",
        )
    now = datetime.now(UTC)

    async def marked(name: str | None) -> Point | None:
        if name is None:
            return None
        mark = await bookmark.find(session, config.relay.name, name)
        return Point(mark.at, mark.lsn, mark.snap)

    bounds = Bounds(
        lsn=parse_lsn(wish.from_lsn) if wish.from_lsn is not None else None,
        at=parse_time(wish.since, now) if wish.since is not None else None,
        mark=await marked(wish.bookmark),
        to_lsn=parse_lsn(wish.to_lsn) if wish.to_lsn is not None else None,
        until=parse_time(wish.until, now) if wish.until is not None else None,
        to_mark=await marked(wish.to_bookmark),
    )
    return Selection(
        until=known.now.snap,
        key=wish.key,
        table=_table(config, wish),
        topic=wish.topic,
        rate=wish.rate,
        wal=await exact_window(session, config, known, bounds),
    )


def _table(config: Config, wish: Wish) -> str | None:
    if wish.table is None:
        return None
    table = wish.table if "." in wish.table else f"public.{wish.table}"
    if table not in [outbox.table for outbox in config.outbox]:
        known_tables = ", ".join(outbox.table for outbox in config.outbox)
        raise ConfigError([f"{table} is not an outbox table of this relay (it has {known_tables})"])
    return table
