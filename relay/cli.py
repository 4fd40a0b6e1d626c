"""The command line. Results go to stdout, talk to stderr; every failure is one sentence and a hint, never a traceback.

Exit codes: 0 clean stop, 1 a failure that a restart may cure, 2 bad configuration or usage, 3 an operator is needed.
Heavy modules are imported by the command that needs them: `relay run` publishes its first event the sooner for it.
"""

from __future__ import annotations

import asyncio
import gc
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self, TypeVar

import typer

from relay import __version__
from relay.errors import ConfigError, OperatorError, RelayError

if TYPE_CHECKING:
    from relay.config import Config

app = typer.Typer(
    name="relay",
    help="Moves events out of PostgreSQL exactly as they were committed.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

ConfigFile = Annotated[
    Path | None, typer.Option("--config", "-c", help="Configuration file; relay.toml if it exists.", metavar="FILE")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

T = TypeVar("T")


@app.command()
def run(
    config: ConfigFile = None,
    from_now: Annotated[
        bool, typer.Option("--from-now", help="First start only: leave alone what the table holds already.")
    ] = False,
) -> None:
    """Run the relay until SIGTERM or SIGINT; a second signal stops it without draining."""
    from relay import log  # noqa: PLC0415

    settings = _load(config)
    # Events live for milliseconds and form no cycles: looking for garbage among them every 700 is time lost.
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    log.configure(settings.log, sys.stderr if settings.sink.kind == "console" else sys.stdout)
    _go(_run(settings, from_now=from_now), quick=True)


async def _run(settings: Config, *, from_now: bool) -> None:
    import structlog  # noqa: PLC0415

    from relay.app import Relay  # noqa: PLC0415

    lines = structlog.get_logger("relay.cli")
    loop = asyncio.get_running_loop()
    asked = False
    try:
        async with Relay(settings, from_now=from_now) as relay:

            def signalled() -> None:
                nonlocal asked
                if asked:
                    lines.warning("relay.aborted")
                    relay.abort()
                else:
                    asked = True
                    lines.info("relay.draining", in_flight_events=relay.progress.in_flight_events)
                    relay.stop()

            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, signalled)
            lines.info("relay.started", version=__version__, name=settings.relay.name, admin_port=relay.admin.port)
            try:
                await relay.wait()
            except asyncio.CancelledError:
                if not asked:
                    raise
                raise RelayError("stopped without draining, by a second signal") from None
    except RelayError as exc:  # for whoever reads the log; stderr gets the plain sentence
        lines.error("relay.failed", error=exc)
        raise
    lines.info("relay.stopped", published_events=relay.progress.published_events)


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

    steps = _go(
        setup(
            _load(config),
            dry_run=dry_run,
            role=role,
            partitioned=partitioned,
            adopt=adopt,
            from_slot=from_slot,
            publication=publication,
        )
    )
    if dry_run and not json:
        typer.echo(script(steps))
    else:
        _print(steps, render, json=json)


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

    settings = _load(config)
    if show_config:
        _print(settings.shown(), None, json=True)
        return
    findings = _go(check(settings, standbys=standby or ()))
    _print(findings, render, json=json)
    if any(finding.level == "error" for finding in findings):
        raise typer.Exit(3)


@app.command()
def status(config: ConfigFile = None, json: Json = False) -> None:
    """Say where the relay is, from Postgres alone: works while the relay is down."""
    from relay.status import render, status  # noqa: PLC0415

    _print(_go(status(_load(config))), render, json=json)


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

    with _Explained():
        counted = demo(rate=rate, seconds=seconds, kafka=kafka, chaos=chaos, kill_every=kill_every)
    _print(counted, render, json=json)
    if not counted.ok:
        raise typer.Exit(1)


benches = typer.Typer(help="Measure the relay on this machine, and compare results.")
app.add_typer(benches, name="bench")
CsvFile = Annotated[Path | None, typer.Option("--csv", help="Write a line per figure to this file.", metavar="FILE")]
HtmlFile = Annotated[Path | None, typer.Option("--html", help="Write a report with plots.", metavar="FILE")]


@benches.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help="backlog, steady, burst, idle, big-transaction, small-transactions, busy-neighbours, slow-broker, "
            "writers, kill; repeatable."
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        typer.Option(help="stream-pgoutput, stream-wal2json, poll-snapshot@1s, poll-claim-4@100ms, …; repeatable."),
    ] = None,
    sink: Annotated[
        list[str] | None,
        typer.Option(help="jetstream, jetstream-shared, jetstream-relaxed, kafka, kafka-exactly-once; repeatable."),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="Another tool, from bench/peers of the repository; repeatable.")
    ] = None,
    baseline: Annotated[str, typer.Option(help="A mode or tool of this run: ratios against it are shown.")] = "",
    rows: Annotated[int | None, typer.Option(help="Rows to drain, or of a burst.")] = None,
    rate: Annotated[int | None, typer.Option(help="Rows per second of the steady scenario.")] = None,
    per_transaction: Annotated[int | None, typer.Option(help="Rows that share a transaction.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length of the measured window.")] = None,
    keys: Annotated[int | None, typer.Option(help="Different keys: 1 is a single hot one. 1000 by default.")] = None,
    repeat: Annotated[int | None, typer.Option(help="Rounds, interleaved; medians and spread are shown.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A first impression, in less than two minutes.")] = False,
    full: Annotated[bool, typer.Option("--full", help="Everything, three times: takes hours.")] = False,
    limit: Annotated[bool, typer.Option("--limit/--no-limit", help="pg_recvlogical beside every drain.")] = True,
    postgres: Annotated[
        str | None, typer.Option(help="Version of the private Postgres: 18; 15 if wal2json is measured.")
    ] = None,
    dsn: Annotated[
        str | None, typer.Option(help="Your own Postgres instead of a private one; a database is created and dropped.")
    ] = None,
    broker: Annotated[
        str | None, typer.Option(help="Your own broker: a NATS URL, or Kafka's bootstrap servers.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Also write the JSON to this file.", metavar="FILE")] = None,
    csv: CsvFile = None,
    html: HtmlFile = None,
    json: Json = False,
) -> None:
    """Measure the relay on this machine: speed, latency, CPU, memory, what it costs Postgres; beside it the limit."""
    if context.invoked_subcommand is not None:
        return
    with _Explained():
        command = _bench_command()
        asked = command.asked(
            scenario or [],
            sinks=sink or [],
            modes=mode or [],
            peers=peer or [],
            baseline=baseline,
            repeat=repeat,
            quick=quick,
            full=full,
            limit=limit,
            keys=keys,
            rows=rows,
            rate=rate,
            per_transaction=per_transaction,
            seconds=seconds,
            postgres=postgres,
            dsn=dsn,
            broker=broker,
        )
    report = _go(command.measured(asked))
    command.write(report, save=save, csv=csv, html=html)
    _print(report, command.render, json=json)
    if not report.correct:
        raise typer.Exit(1)


@benches.command("compare")
def bench_compare(
    before: Annotated[Path, typer.Argument(metavar="A.json")],
    after: Annotated[Path, typer.Argument(metavar="B.json")],
    json: Json = False,
) -> None:
    """Set two results against each other, figure by figure."""
    with _Explained():
        found = _bench_command().compared_files(before, after)
    _print(found, _bench_command().render_comparison, json=json)


@benches.command("plot")
def bench_plot(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json")],
    svg: Annotated[Path | None, typer.Option(help="Write one picture.", metavar="FILE")] = None,
    html: HtmlFile = None,
    csv: CsvFile = None,
    scenario: Annotated[str, typer.Option(help="What the picture shows.")] = "backlog",
) -> None:
    """Make a picture, a report or a table from a result that was saved."""
    with _Explained():
        _bench_command().plot(result, svg=svg, html=html, csv=csv, scenario=scenario)


def _bench_command() -> Any:
    try:
        from relay.bench import command  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise OperatorError(
            f"the benchmark needs {missing.name}", hint="pip install 'pg-outbox-relay[embedded]'"
        ) from None
    return command


@app.command("import-debezium")
def import_debezium(
    files: Annotated[
        list[Path],
        typer.Argument(help="application.properties, or a connector's JSON; later files win.", metavar="FILE…"),
    ],
) -> None:
    """Print the relay.toml for a Debezium outbox configuration, with every option that it cannot translate."""
    from relay.debezium import convert  # noqa: PLC0415

    with _Explained():
        try:
            texts = [(str(file), file.read_text("utf-8")) for file in files]
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError([f"cannot be read: {exc}"]) from None
        typer.echo(convert(texts), nl=False)


@app.command()
def replay(
    config: ConfigFile = None,
    from_lsn: Annotated[str | None, typer.Option("--from-lsn", help="From this LSN on.", metavar="LSN")] = None,
    since: Annotated[
        str | None, typer.Option("--since", help="From this time on: ISO 8601, or how long ago (15m, 2h).")
    ] = None,
    bookmark: Annotated[str | None, typer.Option("--bookmark", help="From this bookmark on.", metavar="NAME")] = None,
    seq: Annotated[int | None, typer.Option("--seq", help="From this seq on.")] = None,
    to_lsn: Annotated[str | None, typer.Option("--to-lsn", help="Up to this LSN.", metavar="LSN")] = None,
    until: Annotated[str | None, typer.Option("--until", help="Up to this time.")] = None,
    to_bookmark: Annotated[str | None, typer.Option("--to-bookmark", help="Up to it.", metavar="NAME")] = None,
    to_seq: Annotated[int | None, typer.Option("--to-seq", help="Up to this seq, inclusive.")] = None,
    key: Annotated[str | None, typer.Option("--key", help="Only events of this key.")] = None,
    ids: Annotated[list[str] | None, typer.Option("--id", help="Only this event; repeatable.")] = None,
    table: Annotated[str | None, typer.Option("--table", help="Only from this outbox table.")] = None,
    topic: Annotated[str | None, typer.Option("--topic", help="Publish to this topic instead.")] = None,
    rate: Annotated[float | None, typer.Option("--rate", help="Events per second, at most.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="From the WAL that the anchor slot holds, as it was first published.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only count.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="If the active relay has to do it (fenced streams): do not wait for it.")
    ] = False,
    json: Json = False,
) -> None:
    """Publish again what was published before, with the same event ids: from the table, or with --exact from the WAL.

    See docs/replay.md.
    """
    from relay.replay import Report, Wish, replay  # noqa: PLC0415

    wish = Wish(
        from_lsn=from_lsn,
        since=since,
        bookmark=bookmark,
        seq=seq,
        to_lsn=to_lsn,
        until=until,
        to_bookmark=to_bookmark,
        to_seq=to_seq,
        key=key,
        ids=tuple(ids or ()),
        table=table,
        topic=topic,
        rate=rate,
        exact=exact,
    )

    def render(report: Report) -> str:
        if report.state == "counted":
            return f"{report.total} events" + (
                "" if exact else " (rows that were deleted from the table cannot be replayed)"
            )
        if report.state == "requested":
            return (
                f"request {report.request}: the active relay replays {report.total or 'the'} events as run {report.run}"
            )
        skipped = f"; {report.skipped} rows cannot be routed, and were left out" if report.skipped else ""
        return f"replayed {report.published} events as run {report.run}{skipped}"

    settings = _load(config)
    with _Bar() as bar:
        report = _go(replay(settings, wish, bar.show, dry_run=dry_run, detach=detach))
    _print(report, render, json=json)


class _Bar:
    """A progress bar on stderr, if that is a terminal."""

    def __enter__(self) -> Self:
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn  # noqa: PLC0415

        console = Console(stderr=True)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("replay", total=None)
        self._progress.start()
        return self

    def show(self, published: int, total: int | None) -> None:
        self._progress.update(self._task, completed=published, total=total)

    def __exit__(self, *_: object) -> None:
        self._progress.stop()


bookmarks = typer.Typer(help="Named points to replay from.", no_args_is_help=True)
app.add_typer(bookmarks, name="bookmark")


@bookmarks.command("add")
def bookmark_add(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    config: ConfigFile = None,
    lsn: Annotated[str | None, typer.Option("--lsn", help="This point instead of now.", metavar="LSN")] = None,
    at: Annotated[str | None, typer.Option("--at", help="This time instead of now: ISO 8601, or 15m, 2h ago.")] = None,
    json: Json = False,
) -> None:
    """Remember a point: everything that the relay has published by now, or by then."""
    from relay.bookmark import add  # noqa: PLC0415
    from relay.history import shown  # noqa: PLC0415

    found = _go(add(_load(config), name, lsn=lsn, at=at))
    _print(found, lambda mark: f"bookmark {mark.name} at {mark.lsn} ({shown(mark.at)})", json=json)


@bookmarks.command("list")
def bookmark_list(config: ConfigFile = None, json: Json = False) -> None:
    """Show the bookmarks of this relay."""
    from relay.bookmark import Bookmark, listed  # noqa: PLC0415
    from relay.history import shown  # noqa: PLC0415

    def render(found: list[Bookmark]) -> str:
        return "\n".join(f"{mark.name}  {mark.lsn}  {shown(mark.at)}" for mark in found) or "no bookmarks"

    _print(_go(listed(_load(config))), render, json=json)


@bookmarks.command("remove")
def bookmark_remove(name: Annotated[str, typer.Argument(metavar="NAME")], config: ConfigFile = None) -> None:
    """Forget a bookmark."""
    from relay.bookmark import remove  # noqa: PLC0415

    _go(remove(_load(config), name))


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

    _print(_go(takeover(_load(config))), render, json=json)


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
    _print(_go(adopt_timeline(_load(config), PUBLISHED[published])), render, json=json)


@app.command()
def version(json: Json = False) -> None:
    """Print the version."""
    _print({"version": __version__}, lambda found: f"relay {found['version']}", json=json)


def _load(path: Path | None) -> Config:
    from relay import log  # noqa: PLC0415
    from relay.config import load  # noqa: PLC0415

    default = Path("relay.toml")
    with _Explained():
        settings = load(path if path is not None else default if default.exists() else None)
    log.configure(settings.log)  # talk goes to stderr: stdout is for results; only `run` changes that
    return settings


def _go(work: Coroutine[Any, Any, T], *, quick: bool = False) -> T:
    """Run it to its end; `quick`: on uvloop's loop where there is one, which saves a third of an event's latency."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if quick:
        with suppress(ImportError):
            from uvloop import new_event_loop as factory  # noqa: PLC0415
    with _Explained(), asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


def _print(value: Any, render: Any, *, json: bool) -> None:
    if json:
        import orjson  # noqa: PLC0415

        typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2, default=str).decode())
    else:
        from rich.console import Console  # noqa: PLC0415

        Console(soft_wrap=True, highlight=False).print(render(value))


class _Explained:
    """Turns our errors into one sentence, a hint and an exit code."""

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, RelayError):
            faults = error.faults if isinstance(error, ConfigError) else [str(error)]
            for fault in faults:
                typer.echo(f"error: {fault}", err=True)
            if error.hint:
                typer.echo(f"hint: {error.hint}", err=True)
            raise typer.Exit(error.exit_code) from None
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(130) from None


def main() -> None:
    app()
