"""`relay replay` and `relay bookmark`: publishing again, and the points to do it from."""

from __future__ import annotations

from typing import Annotated, Self

import typer

from relay.cli_frame import ConfigFile, Json, show
from relay.frame import go, load


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
    from relay.replay import Report, replay  # noqa: PLC0415
    from relay.wish import Wish  # noqa: PLC0415

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
        absent = len(set(wish.ids)) - (report.total or 0) if wish.ids else 0
        unknown = f"; {absent} of the ids belong to no row that was published" if absent > 0 else ""
        nothing = "" if report.published or skipped or unknown else ": nothing matches"
        return f"replayed {report.published} events as run {report.run}{nothing}{skipped}{unknown}"

    settings = load(config)
    with _Bar() as bar:
        report = go(replay(settings, wish, bar.show, dry_run=dry_run, detach=detach))
    show(report, render, json=json)


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

    found = go(add(load(config), name, lsn=lsn, at=at))
    show(found, lambda mark: f"bookmark {mark.name} at {mark.lsn} ({shown(mark.at)})", json=json)


@bookmarks.command("list")
def bookmark_list(config: ConfigFile = None, json: Json = False) -> None:
    """Show the bookmarks of this relay."""
    from relay.bookmark import Bookmark, listed  # noqa: PLC0415
    from relay.history import shown  # noqa: PLC0415

    def render(found: list[Bookmark]) -> str:
        return "\n".join(f"{mark.name}  {mark.lsn}  {shown(mark.at)}" for mark in found) or "no bookmarks"

    show(go(listed(load(config))), render, json=json)


@bookmarks.command("remove")
def bookmark_remove(name: Annotated[str, typer.Argument(metavar="NAME")], config: ConfigFile = None) -> None:
    """Forget a bookmark."""
    from relay.bookmark import remove  # noqa: PLC0415

    go(remove(load(config), name))
