"""`relay bench`: its options. What they lead to is `relay/bench/`, imported when it is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from relay.cli_frame import Json, show
from relay.errors import OperatorError
from relay.frame import Explained, go

benches = typer.Typer(help="Measure the relay on this machine, and compare results.")
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
        typer.Option(
            help="jetstream, jetstream-atomic, jetstream-shared, jetstream-relaxed, kafka, kafka-exactly-once; "
            "repeatable."
        ),
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
    calm: Annotated[
        float | None,
        typer.Option(
            help="Measure again, ten times at most, where the hypervisor took more of the CPU than this.",
            metavar="PERCENT",
        ),
    ] = None,
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
    with Explained():
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
            calm=calm,
        )
    report = go(command.measured(asked))
    command.write(report, save=save, csv=csv, html=html)
    show(report, command.render, json=json)
    if not report.correct:
        raise typer.Exit(1)


@benches.command("compare")
def bench_compare(
    before: Annotated[Path, typer.Argument(metavar="A.json")],
    after: Annotated[Path, typer.Argument(metavar="B.json")],
    json: Json = False,
) -> None:
    """Set two results against each other, figure by figure."""
    with Explained():
        found = _bench_command().compared_files(before, after)
    show(found, _bench_command().render_comparison, json=json)


@benches.command("plot")
def bench_plot(
    result: Annotated[Path, typer.Argument(metavar="RESULT.json")],
    svg: Annotated[Path | None, typer.Option(help="Write one picture.", metavar="FILE")] = None,
    html: HtmlFile = None,
    csv: CsvFile = None,
    scenario: Annotated[str, typer.Option(help="What the picture shows.")] = "backlog",
) -> None:
    """Make a picture, a report or a table from a result that was saved."""
    with Explained():
        _bench_command().plot(result, svg=svg, html=html, csv=csv, scenario=scenario)


def _bench_command() -> Any:
    try:
        from relay.bench import command  # noqa: PLC0415
    except ModuleNotFoundError as missing:
        raise OperatorError(
            f"the benchmark needs {missing.name}", hint="pip install 'pg-outbox-relay[embedded]'"
        ) from None
    return command
