"""`relay setup`: makes what the relay needs in Postgres, from the files in sql/. Run it as often as you like.

First everything is looked at (setup_found.py), then a plan is made (setup_plan.py), then it is carried out in one
transaction; a dry run stops before that. Adopting tables (adopt.py) comes after it, table by table. It never drops or
rewrites anything, and it never makes the relay's slot: the first `relay run` does, because the publication must exist
before it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from relay.adopt import Step
from relay.config import Config
from relay.errors import AuthError, ConfigError, SetupError, SourceUnavailable
from relay.setup_found import Wish, look
from relay.setup_plan import plan
from relay.source.session import Session, connect, translated

ATTEMPTS = 30  # to get the lock that adopting a table needs
_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('outbox_relay_setup', 0))"


async def setup(
    config: Config,
    *,
    dry_run: bool = False,
    role: str | None = None,
    partitioned: bool = False,
    adopt: bool = False,
    from_slot: str | None = None,
    publication: str | None = None,
) -> list[Step]:
    """Make what is missing; returns what was done, or with `dry_run` what would be."""
    wish = Wish(role, partitioned, adopt, from_slot)
    _agree(config, from_slot, publication)
    session = await connect(config.database, "relay setup")
    async with session:
        if dry_run:
            return plan(config, await look(session, config, wish), wish)
        try:
            with translated():
                async with session.transaction():
                    # A second setup waits here, and then finds everything present.
                    await session.execute("SET LOCAL lock_timeout = '60s'")
                    await session.execute(_LOCK)
                    await session.execute("SET LOCAL lock_timeout = '10s'")
                    steps = plan(config, await look(session, config, wish), wish)
                    done = [step if step.alone else await _carry_out(session, step) for step in steps]
            for step in done:
                if step.alone:
                    await _patiently(session, step)
            return done
        except AuthError as exc:
            raise AuthError(
                str(exc),
                hint="run setup as the owner of the database and its outbox tables, "
                "or give the output of `relay setup --dry-run` to somebody who is",
            ) from exc


def _agree(config: Config, slot: str | None, publication: str | None) -> None:
    """`relay run` will read them from the configuration: what the command line says must stand there, too."""
    said = {"slot": (slot, config.source.slot), "publication": (publication, config.source.publication)}
    faults = [
        f"source.{name} is {configured!r} in the configuration, not {asked!r}"
        for name, (asked, configured) in said.items()
        if asked is not None and asked != configured
    ]
    if faults:
        lines = ", ".join(f'{name} = "{asked}"' for name, (asked, _) in said.items() if asked is not None)
        raise ConfigError(faults, hint=f"write under [source] of relay.toml: {lines}")


async def _patiently(session: Session, step: Step) -> None:
    """A step that needs a lock which writers have, too: ask for it briefly, again and again."""
    for left in range(ATTEMPTS - 1, -1, -1):
        try:
            with translated():
                await session.execute("SET lock_timeout = '10s'")
                await session.execute(step.sql.encode())
        except SourceUnavailable as exc:
            if session.closed:
                raise
            await session.rollback()
            if not left:
                raise SetupError(
                    f"{step.subject}: {exc}",
                    hint="a long transaction holds the table: SELECT pid, xact_start, query FROM pg_stat_activity "
                    "WHERE xact_start IS NOT NULL ORDER BY xact_start; run setup again when it is over",
                ) from exc
            await asyncio.sleep(0.3)
        else:
            return


async def _carry_out(session: Session, step: Step) -> Step:
    if not step.sql:
        return step
    # Without parameters psycopg sends the text as it is, so that one step may be several statements.
    cursor = await session.execute(step.sql.encode())
    if step.action == "present":  # SQL that finds out by itself whether there is something to do
        row = await cursor.fetchone()
        return replace(step, action="altered") if row and row[0] else step
    return step


def script(steps: Sequence[Step]) -> str:
    """The plan as a script to paste into psql."""
    parts = [f"-- {step.subject}\n{step.sql.strip()}\n" for step in steps if step.sql and not step.alone]
    alone = [f"-- {step.subject}: {step.note}\n{step.sql.strip()}\n" for step in steps if step.sql and step.alone]
    notes = [f"-- note: {step.subject}: {step.note}\n" for step in steps if step.note and not step.alone]
    if not parts and not alone:
        return "".join(notes) + "-- nothing to do\n"
    text = "".join(notes) + ("BEGIN;\n\n" + "\n".join(parts) + "\nCOMMIT;\n" if parts else "")
    return text + "".join(f"\n{each}" for each in alone)


def render(steps: Sequence[Step]) -> RenderableType:
    """For people: what was done, thing by thing."""
    table = Table.grid(padding=(0, 2))
    styles = {"created": "green", "altered": "yellow", "present": "dim", "warning": "yellow"}
    for step in steps:
        table.add_row(Text(step.action, style=styles[step.action]), Text(step.subject), Text(step.note))
    return table
