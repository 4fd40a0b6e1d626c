"""The command line. Results go to stdout, talk to stderr; every failure is one sentence and a hint, never a traceback.

Exit codes: 0 clean stop, 1 a failure that a restart may cure, 2 bad configuration or usage, 3 an operator is needed.
Heavy modules are imported by the command that needs them.
"""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import typer

from relay import __version__, daemon
from relay.cli_bench import benches
from relay.cli_frame import ConfigFile, Json, printing, show, unwritable
from relay.cli_replay import bookmarks, replay
from relay.errors import ConfigError
from relay.frame import Explained, go, load

app = typer.Typer(
    name="relay",
    help="Moves events out of PostgreSQL exactly as they were committed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.command()
def run(
    config: ConfigFile = None,
    from_now: Annotated[
        bool, typer.Option("--from-now", help="First start only: leave alone what the table holds already.")
    ] = False,
) -> None:
    """Run the relay until SIGTERM or SIGINT; a second signal stops it without draining."""
    daemon.run(config, from_now=from_now)


@app.command()
def setup(
    config: ConfigFile = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the SQL instead of running it.")] = False,
    role: Annotated[str | None, typer.Option("--role", help="Also create this least-privilege login role.")] = None,
    partitioned: Annotated[bool, typer.Option("--partitioned", help="Make the outbox table partitioned.")] = False,
    adopt: Annotated[
        bool, typer.Option("--adopt", help="Add to existing tables the columns that recovery from the table needs.")
    ] = False,
    from_slot: Annotated[
        str | None,
        typer.Option(
            "--from-slot", help="Continue this slot where its former reader (Debezium) stopped.", metavar="NAME"
        ),
    ] = None,
    publication: Annotated[
        str | None, typer.Option("--publication", help="With --from-slot: the publication it streams.", metavar="NAME")
    ] = None,
    json: Json = False,
) -> None:
    """Create what the relay needs in the database: tables and publication. Repeatable; never drops anything."""
    from relay.setup import render, script, setup  # noqa: PLC0415

    steps = go(
        setup(
            load(config),
            dry_run=dry_run,
            role=role,
            partitioned=partitioned,
            adopt=adopt,
            from_slot=from_slot,
            publication=publication,
        )
    )
    if dry_run and not json:
        with printing():
            typer.echo(script(steps))
    else:
        show(steps, render, json=json)


@app.command()
def check(
    config: ConfigFile = None,
    show_config: Annotated[
        bool, typer.Option("--show-config", help="Only print the configuration in effect, as JSON, secrets masked.")
    ] = False,
    standby: Annotated[
        list[str] | None,
        typer.Option("--standby", help="With source.failover: look at this standby, too; repeatable.", metavar="DSN"),
    ] = None,
    json: Json = False,
) -> None:
    """Look at everything the relay needs, and say for each fault how to mend it. Exit code 3 if there is one."""
    from relay.check import check, render  # noqa: PLC0415

    settings = load(config)
    if show_config:
        show(settings.shown(), None, json=True)
        return
    findings = go(check(settings, standbys=standby or ()))
    show(findings, render, json=json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(3)


@app.command()
def status(config: ConfigFile = None, json: Json = False) -> None:
    """Say where the relay is, from Postgres alone: works while the relay is down."""
    from relay.status import render, status  # noqa: PLC0415

    settings = load(config)
    polls = settings.source.mode == "poll"
    show(go(status(settings)), lambda found: render(found, polls=polls), json=json)


@app.command()
def demo(
    rate: Annotated[int, typer.Option("--rate", min=1, help="Transactions of the shop per second.")] = 200,
    seconds: Annotated[float, typer.Option("--seconds", min=0, help="How long; 0: until Ctrl-C.")] = 0.0,
    kafka: Annotated[bool, typer.Option("--kafka", help="Kafka instead of NATS JetStream.")] = False,
    chaos: Annotated[bool, typer.Option("--chaos", help="Kill the relay (kill -9) again and again.")] = False,
    kill_every: Annotated[float, typer.Option("--kill-every", min=0.1, help="With --chaos: seconds between.")] = 10.0,
    json: Json = False,
) -> None:
    """Show it all on private servers: a shop, the relay, a consumer, and a count. Exit code 1 if an event is lost."""
    from relay.demo import demo, render  # noqa: PLC0415

    with Explained():
        counted = demo(rate=rate, seconds=seconds, kafka=kafka, chaos=chaos, kill_every=kill_every)
    show(counted, render, json=json)
    if not counted.ok:
        raise typer.Exit(1)


@app.command("import-debezium")
def import_debezium(
    files: Annotated[
        list[Path],
        typer.Argument(help="application.properties, or a connector's JSON; later files win.", metavar="FILE…"),
    ],
) -> None:
    """Print the relay.toml for a Debezium outbox configuration, with every option that it cannot translate."""
    from relay.debezium import convert  # noqa: PLC0415

    with Explained(), printing():
        try:
            texts = [(str(file), file.read_text("utf-8")) for file in files]
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError([f"cannot be read: {exc}"]) from None
        typer.echo(convert(texts).encode(), nl=False)  # TOML is UTF-8, whatever the terminal is


app.command()(replay)


@app.command()
def takeover(config: ConfigFile = None, json: Json = False) -> None:
    """Make the active relay let go, so that a stand-by takes over."""
    from relay.takeover import Ended, takeover  # noqa: PLC0415

    def render(ended: list[Ended]) -> str:
        if not ended:
            return "no relay is active"
        return "\n".join(
            f"ended process {each.pid} ({each.role}; {each.application_name} from {each.client or 'a local socket'})"
            for each in ended
        )

    show(go(takeover(load(config))), render, json=json)


@app.command("adopt-timeline")
def adopt_timeline(
    config: ConfigFile = None,
    published: Annotated[
        str,
        typer.Option(
            "--published",
            help="What to believe of the rows: checkpoint (the saved snapshot holds: pg_upgrade), nothing "
            "(publish the whole table: dump and restore), everything (only what comes from now on).",
        ),
    ] = "checkpoint",
    json: Json = False,
) -> None:
    """After pg_upgrade, a restore or a move: let the checkpoint belong to the server that is there now."""
    from relay.timeline import PUBLISHED, Adopted, adopt_timeline  # noqa: PLC0415

    def render(found: Adopted) -> str:
        return (
            f"the checkpoint of {found.relay} now belongs to system {found.system_identifier}, timeline "
            f"{found.timeline} (before: system {found.before}); published so far: {found.published}"
        )

    if published not in PUBLISHED:
        raise typer.BadParameter(f"choose one of {', '.join(PUBLISHED)}", param_hint="--published")
    show(go(adopt_timeline(load(config), PUBLISHED[published])), render, json=json)


@app.command()
def version(json: Json = False) -> None:
    """Print the version."""
    show({"version": __version__}, lambda found: f"relay {found['version']}", json=json)


app.add_typer(benches, name="bench")
app.add_typer(bookmarks, name="bookmark")


def main() -> None:
    try:
        app()
    except OSError as exc:  # a page of help on a full disk; what commands print is in `printing`
        if exc.errno != errno.ENOSPC or exc.filename is not None:
            raise
        unwritable(exc)
