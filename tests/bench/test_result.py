"""Statistics, tables, CSV, plots and comparisons: pure parts, on figures made up."""

from __future__ import annotations

import csv
import io
import json
import socket
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET

import orjson
import pytest
from rich.console import Console

from relay.bench.compare import compare, render_comparison, verdict
from relay.bench.export import to_csv
from relay.bench.html import to_html
from relay.bench.meter import Stolen
from relay.bench.notes import Notes
from relay.bench.picture import picture
from relay.bench.plan import make_plan
from relay.bench.render import render
from relay.bench.result import (
    FORMAT,
    QUANTILES,
    Cpu,
    Footprint,
    Measurement,
    Report,
    Sample,
    Spread,
    State,
    Writers,
    figures,
    flow,
    footprint,
    latency,
    read_report,
    summarise,
)
from relay.bench.subscriber import Frames
from relay.errors import ConfigError

MODES = ("stream-pgoutput", "poll-snapshot@100ms", "poll-claim-4@100ms", "poll-claim-4@1s", "poll-claim<&>")


def _report(repetitions: int = 3, speed: float = 1000.0) -> Report:
    plan = make_plan(["backlog", "steady", "writers", "kill"], repeat=repetitions, baseline="relay")
    found: list[Measurement] = []
    for repetition in range(repetitions):
        for number, mode in enumerate(MODES, start=1):
            backlog = Measurement("backlog", "jetstream", "relay", mode, repetition, number, rows=9, stored=9)
            grown = Footprint(12.5, 10_000_000, 100, 20_000_000, 3_000_000)
            cpu = Cpu(9.0 * number, 4.0 if number == 1 else None, 12.0, 5.0)
            found += [
                replace(
                    backlog,
                    events_per_second=speed * number + repetition,
                    cpu_us_per_event=cpu,
                    footprint=grown,
                    peak_rss_bytes=60_000_000,
                    against_baseline={"events_per_second": 1.0 / number},
                ),
                replace(
                    backlog,
                    scenario="steady",
                    latency=latency([n / 1000 * number for n in range(1, 101)]),
                    cores=cpu.divided_by(100),
                ),
                replace(backlog, scenario="writers", writers=Writers(2000.0, 1800.0, 0.9)),
                replace(backlog, scenario="kill", killed=True, missing=0, duplicates_seen=number, stored=9 + number),
            ]
        found.append(replace(found[0], tool="pg_recvlogical", stored=None, repetition=repetition))
    environment = {
        "at": "2026-11-16",
        "command": "relay bench --full",
        "relay": "1",
        "postgres": "18",
        "broker": "nats-server 2",
        "cores": 2,
        "machine": "Linux",
        "payload_bytes": 322,
        "keys": 1000,
        "load_average_at_start": [2.0, 1.0, 1.0],
    }
    return Report(FORMAT, environment, plan, summarise(found), found, {"relay": {"version": "1"}})


def test_flow_counts_from_the_first_sample_that_moved_to_the_last() -> None:
    samples = [Sample(10.0, 0, 1.0), Sample(11.0, 100, 2.0), Sample(12.0, 500, 3.0), Sample(13.0, 1100, 4.0)]
    seen = flow([*samples, Sample(20.0, 1100, 9.0)], started=9.0, rows=1100)
    assert (seen.start, seen.seconds, seen.events, seen.events_per_second) == (2.0, 2.0, 1000.0, 500.0)
    assert seen.tool_cpu == 2.0
    assert flow(samples[:1], started=9.0, rows=1100).events_per_second is None
    assert flow(samples[:2], started=9.0, rows=1100).events_per_second is None  # over too soon to be timed


def test_latency_by_nearest_rank() -> None:
    found = latency([n / 1000 for n in range(1, 101)])
    assert found is not None
    assert (found.p50_ms, found.p99_ms, found.max_ms) == (50.0, 99.0, 100.0)
    assert (found.curve_ms[0], found.curve_ms[-1], len(found.curve_ms)) == (1.0, 100.0, len(QUANTILES))
    assert latency([]) is None


def test_medians_and_spread() -> None:
    summary = _report().summaries[0]
    assert summary.figures["events_per_second"] == Spread(1001.0, 1000.0, 1002.0)
    assert summary.repetitions == 3


def test_what_the_machine_did_is_said_beside_the_figures() -> None:
    report = _report()
    calm = {**report.environment, "load_average_at_start": [0.2, 0.1, 0.1]}
    found = [replace(each, stolen_share=0.01) for each in report.measurements]
    quiet = replace(report, environment=calm, measurements=found, summaries=summarise(found))
    assert not quiet.doubts
    assert quiet.summaries[0].figures["stolen_share"].median == 0.01
    robbed = replace(quiet, measurements=[replace(found[0], stolen_share=0.28), *found[1:]])
    (doubt,) = robbed.doubts
    assert "28%" in doubt
    assert doubt in to_html(robbed).replace("&#x27;", "'")


def test_what_was_put_aside_is_counted_and_must_be_correct_too() -> None:
    report = _report()
    robbed = replace(report.measurements[0], stolen_share=0.28)
    report = replace(report, set_aside=[robbed, replace(robbed, stolen_share=0.1)])
    assert "2 further measurements" in report.doubts[-1]
    assert "10.0% to 28.0%" in report.doubts[-1]
    assert report.correct
    assert not replace(report, set_aside=[replace(robbed, stored=robbed.rows - 1)]).correct


class Times(NamedTuple):
    user: float
    system: float
    idle: float
    steal: float
    guest: float


def test_the_stolen_share_is_of_all_cores_and_of_the_time_between(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Times(100, 10, 50, 5, 40), Times(110, 12, 55, 8, 45)])
    monkeypatch.setattr("relay.bench.meter.psutil.cpu_times", lambda: next(looks))
    assert Stolen().share() == 0.15  # 3 s of 20: those of guests are among the user's


@pytest.mark.parametrize(
    ("more", "correct"),
    [
        ({"stored": 8}, False),
        ({"stored": 10}, False),  # one came twice, and nobody was killed
        ({"stored": None}, True),  # the limit
        ({"stored": 10, "missing": 0, "duplicates_seen": 1}, False),
        ({"stored": 10, "missing": 0, "duplicates_seen": 1, "killed": True}, True),
        ({"stored": 10, "missing": 1, "duplicates_seen": 2, "killed": True}, False),
    ],
)
def test_what_is_lost_or_came_twice_is_seen(more: dict[str, int | None], correct: bool) -> None:
    each = Measurement("backlog", "jetstream", "relay", "m", 0, 0, rows=9, stored=9)
    assert replace(each, **more).correct is correct  # type: ignore[arg-type]


def test_the_footprint_is_what_changed() -> None:
    found = footprint(State(100, 10, 5, 0), State(1100, 30, 6, 7), [3, None, 9], 10)
    assert found == Footprint(100.0, 9, 7, 20, 1)
    assert footprint(State(1, 1, 1, 1), State(2, 1, 1, 1), [None], None).wal_retained_bytes is None


def test_a_wide_comparison_fits_into_100_columns() -> None:
    console = Console(width=200, file=io.StringIO(), record=True, highlight=False)
    console.print(render(_report()))
    text = console.export_text()
    assert max(len(line.rstrip()) for line in text.splitlines()) <= 100
    assert "poll-claim-4@100ms" in text
    assert "continued" in text
    assert "1,001 (1,000…1,002)" in text
    assert "busy before the run" in text


def test_a_result_file_is_read_back_as_it_was(tmp_path: Path) -> None:
    report = _report()
    path = tmp_path / "r.json"
    path.write_bytes(orjson.dumps(report))
    again = read_report(path)
    assert again == report
    assert again.summaries[0].figures == report.summaries[0].figures
    path.write_bytes(orjson.dumps(replace(report, format=1)))
    with pytest.raises(ConfigError, match="format 1"):
        read_report(path)
    for text in ("{}", "[", json.dumps({"format": 2})):
        path.write_text(text)
        with pytest.raises(ConfigError, match="not a result"):
            read_report(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_report(tmp_path / "none.json")


def test_csv_has_a_line_per_figure() -> None:
    report = _report(1)
    lines = list(csv.DictReader(io.StringIO(to_csv(report))))
    expected = sum(
        1
        for each in report.measurements
        for name, value in figures(each).items()
        if value is not None and not name.startswith("curve.")
    )
    assert len(lines) == expected
    assert {line["figure"] for line in lines} >= {"events_per_second", "p99_ms", "writers.share", "duplicates_seen"}
    assert all(float(line["value"]) >= 0 for line in lines)


def _tags(text: str) -> Sequence[str]:
    return [element.tag.rpartition("}")[2] for element in ET.fromstring(text).iter()]


def test_the_html_stands_alone_and_is_well_formed() -> None:
    text = to_html(_report())
    tags = _tags(text.removeprefix("<!DOCTYPE html>\n"))
    assert tags.count("svg") >= 8
    assert "polyline" in tags  # the curve of the latencies
    assert not {"script", "img", "link", "iframe"} & set(tags)
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "poll-claim&lt;&amp;&gt;" in text


def test_a_picture_for_a_page() -> None:
    report = _report()
    assert "rect" in _tags(picture(report, "backlog"))
    assert "polyline" in _tags(picture(report, "steady"))
    with pytest.raises(ConfigError, match="nothing to draw of idle"):
        picture(report, "idle")


def test_two_results_are_compared_by_their_spread() -> None:
    found = compare(_report(), _report(speed=2000.0))
    first = next(each for each in found if each.figure == "events_per_second")
    assert first.ratio == pytest.approx(2.0, rel=0.01)
    assert first.verdict == "better"
    assert {each.verdict for each in found if each.figure != "events_per_second"} == {""}
    console = Console(width=100, file=io.StringIO(), record=True)
    console.print(render_comparison(found))
    assert "better" in console.export_text()
    assert compare(_report(), replace(_report(), summaries=[])) == []
    assert verdict("p99_ms", Spread(5, 4, 6), Spread(9, 8, 10)) == "worse"
    assert verdict("events_per_second", Spread(5, 4, 6), Spread(9, 8, 10)) == "better"
    assert verdict("events_per_second", Spread(5, 4, 9), Spread(9, 8, 10)) == ""


def test_the_subscriber_tells_rows_apart_by_their_number(tmp_path: Path) -> None:
    notes = Notes(live=True)
    plain = b'{"event_id":"x","payload":{"t": 1700000000000000, "item": "000000007", "note": "x"}}'
    escaped = b'{"payload":"{\\"t\\": 1700000000000001, \\"item\\": \\"000000008\\"}"}'
    notes.arrivals(iter([plain, escaped, plain, b"something else"]))
    notes.save(tmp_path / "n.json")
    saved = orjson.loads((tmp_path / "n.json").read_bytes())
    assert saved["written"] == [1700000000000000, 1700000000000001, 1700000000000000]
    assert (saved["events"], saved["distinct"]) == (4, 2)


def test_rows_are_found_wherever_a_pipe_cuts_them() -> None:
    row = b'w\x00{"t": 17000000000000%02d, "item": "0000000%02d", "note": "%b"}\n'
    rows = [row % (number, number, b"x" * number) for number in range(99)]
    stream = b"".join(rows)
    for size in (1, 7, 100, len(stream)):
        notes, rest = Notes(live=True), b""
        for at in range(0, len(stream), size):
            rest = notes.stretch(rest + stream[at : at + size])
        assert (notes.events, notes.seen.count(1)) == (99, 99)
        assert notes.written.tolist() == [1700000000000000 + n for n in range(99)]


def test_nats_frames_are_cut_wherever_the_socket_cuts_them() -> None:
    def headed(subject: bytes, head: bytes, body: bytes) -> bytes:
        return b"HMSG %b %d %d\r\n%b%b\r\n" % (subject, len(head), len(head) + len(body), head, body)

    stream = (
        b'MSG box.made 2 10\r\n{"a": "b"}\r\n'
        + headed(b"t.a 1 $JS.ACK.x", b"NATS/1.0\r\n\r\n", b"hello")
        + b"PING\r\n"
        + headed(b"box 1 $JS.FC.1", b"NATS/1.0 100 FlowControl Request\r\n\r\n", b"")
        + b"MSG t.a 1 2\r\n\r\n\r\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for size in (1, 7, len(stream)):
            frames = Frames(ours, "box")
            pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
            assert [body for piece in pieces for body in frames.bodies(piece)] == [b"hello", b"\r\n"]
            assert frames.answer == b'{"a": "b"}'
            assert theirs.recv(1000) == b"PONG\r\nPUB $JS.FC.1 0\r\n\r\n"
