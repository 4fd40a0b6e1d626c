"""`relay bench` on real servers, tiny: the report has its shape, and nothing is lost. No figure is judged here."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from typing import Any

import psutil
import pytest

from relay.bench.plan import make_plan
from relay.bench.result import Measurement, Sample, flow, latency, summarise
from relay.bench.runner import against_limit
from relay.embedded.process import wait_until
from relay.errors import ConfigError

ROWS = 2000


def _bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "relay", "bench", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_backlog_and_steady_lose_nothing() -> None:
    sizes = ("--rows", str(ROWS), "--rate", "200", "--seconds", "2")
    report = _bench("--scenario", "backlog", "--scenario", "steady", *sizes)
    assert report["format"] == 1
    assert report["environment"]["payload_bytes"] == 322
    relay, limit, steady = report["measurements"]
    assert (relay["tool"], limit["tool"], steady["tool"]) == ("relay", "pg_recvlogical", "relay")
    assert relay["stored"] == relay["rows"] == ROWS
    assert relay["start_to_first_seconds"] > 0
    assert relay["peak_rss_bytes"] > 10_000_000
    for part in ("tool", "walsender", "postgres", "broker"):
        assert relay["cpu_seconds"][part] >= 0
    assert limit["stored"] is None
    assert limit["start_to_first_seconds"] > 0
    assert steady["stored"] == steady["rows"] > 0
    assert steady["duplicates_seen"] == 0
    assert 0 < steady["latency"]["events"] <= steady["rows"]
    assert 0 < steady["latency"]["p50_ms"] <= steady["latency"]["p99_ms"] <= steady["latency"]["max_ms"]
    assert [each["scenario"] for each in report["summaries"]] == ["backlog", "backlog", "steady"]
    assert all(each["correct"] for each in report["summaries"])


def test_ctrl_c_leaves_no_process_behind() -> None:
    command = [sys.executable, "-m", "relay", "bench", "--scenario", "idle", "--seconds", "600"]
    bench = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert bench.stderr is not None
        assert any("nothing happens" in line for line in bench.stderr)
        started = psutil.Process(bench.pid).children(recursive=True)
        assert len(started) > 3  # Postgres, nats-server, the relay, and who watches over them
        bench.send_signal(signal.SIGINT)
        bench.communicate(timeout=90)
        assert bench.returncode == 130
        assert wait_until(lambda: not any(process.is_running() for process in started), 90.0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            bench.kill()


def test_every_fault_of_the_command_line_is_named() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(["backlog", "nonsense"], sink="carrier-pigeon", rows=0)
    assert len(caught.value.faults) == 3


def test_a_size_changes_only_the_scenarios_that_have_it() -> None:
    plan = make_plan([], sink="jetstream", rows=7, quick=True)
    by_name = {scenario.name: scenario for scenario in plan.scenarios}
    assert by_name["backlog"].rows == by_name["big-transaction"].rows == 7
    assert by_name["steady"].rows == by_name["idle"].rows == 0
    assert by_name["steady"].seconds == 10.0


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
    assert latency([]) is None


def test_ratios_stay_within_a_round_and_missing_rows_are_seen() -> None:
    def one(tool: str, speed: float, repetition: int, stored: int | None) -> Measurement:
        return Measurement(
            "backlog", "jetstream", tool, "m", repetition, 0, rows=9, stored=stored, events_per_second=speed
        )

    first = against_limit([one("relay", 50.0, 0, 9), one("pg_recvlogical", 100.0, 0, None)])
    second = against_limit([one("pg_recvlogical", 200.0, 1, None), one("relay", 180.0, 1, 8)])
    relay, limit = summarise([*first, *second])
    assert (relay.figures["ratio_to_limit"].low, relay.figures["ratio_to_limit"].high) == (0.5, 0.9)
    assert not relay.correct
    assert limit.correct
