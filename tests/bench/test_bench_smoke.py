"""`relay bench` on real servers, tiny: the report has its shape, and nothing is lost. No figure is judged here."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import psutil
import psycopg
from confluent_kafka.admin import AdminClient

from relay.bench.result import read_report
from relay.embedded.process import wait_until
from tests.fix_kafka import Kafka
from tests.fix_postgres import Postgres

ROWS = 2000


def _bench(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "relay", "bench", "--json", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_streaming_and_polling_side_by_side_lose_nothing(tmp_path: Path) -> None:
    modes = ("--mode", "stream-pgoutput", "--mode", "poll-claim-4@100ms", "--baseline", "poll-claim-4@100ms")
    files = ("--save", str(tmp_path / "r.json"), "--csv", str(tmp_path / "r.csv"), "--html", str(tmp_path / "r.html"))
    report = _bench("--scenario", "backlog", *modes, "--rows", str(ROWS), *files)
    relay, limit, claim = report["measurements"]
    assert (relay["tool"], limit["tool"], claim["tool"]) == ("relay", "pg_recvlogical", "relay")
    assert (relay["mode"], claim["mode"]) == ("stream-pgoutput", "poll-claim-4@100ms")
    assert report["environment"]["payload_bytes"] == 322
    assert report["environment"]["command"].startswith("relay bench --json --scenario backlog")
    for each in (relay, claim):
        assert each["stored"] == each["rows"] == ROWS
        assert each["start_to_first_seconds"] > 0
        assert each["peak_rss_bytes"] > 10_000_000
        assert set(each["against_baseline"]) >= {"peak_rss_bytes"}
        assert each["wal_load_bytes_per_event"] > 322
        for part in ("tool", "postgres", "broker"):
            assert each["cpu_seconds"][part] >= 0
    assert relay["cpu_seconds"]["walsender"] >= 0
    assert relay["footprint"]["wal_retained_bytes"] > 322 * ROWS
    assert claim["cpu_seconds"]["walsender"] is None
    # Claiming marks every row; streaming touches none.
    assert claim["footprint"]["wal_bytes_per_event"] > 50
    assert relay["footprint"]["dead_tuples"] == 0
    assert limit["stored"] is None
    assert limit["start_to_first_seconds"] > 0
    assert all(each["correct"] for each in report["summaries"])
    assert "relay stream-pgoutput, jetstream" in report["tools"]

    again = read_report(tmp_path / "r.json")
    assert len(again.measurements) == 3
    assert (tmp_path / "r.csv").read_text().startswith("scenario,sink,tool,mode,repetition,correct,figure,value\n")
    ET.fromstring((tmp_path / "r.html").read_text().removeprefix("<!DOCTYPE html>\n"))


def test_a_steady_rate_is_heard_by_the_subscriber_and_a_kill_loses_nothing() -> None:
    sizes = ("--rows", str(ROWS), "--rate", "200", "--per-transaction", "5", "--seconds", "2")
    report = _bench("--quick", "--mode", "stream-pgoutput", "--scenario", "steady", "--scenario", "kill", *sizes)
    steady, limit, kill = report["measurements"]
    assert (limit["tool"], limit["missing"], limit["ratio_to_limit"]) == ("pg_recvlogical", 0, None)
    assert limit["latency"]["p50_ms"] > 0
    assert steady["stored"] == steady["rows"] > 0
    assert steady["rows"] % 5 == 0  # whole transactions
    assert (steady["duplicates_seen"], steady["missing"]) == (0, 0)
    assert 0 < steady["latency"]["events"] <= steady["rows"]
    assert 0 <= steady["stolen_share"] < 1
    assert 0 < steady["latency"]["p50_ms"] <= steady["latency"]["p99_ms"] <= steady["latency"]["max_ms"]
    assert kill["killed"]
    assert (kill["missing"], kill["duplicates_seen"]) == (0, 0)  # the stream is fenced


def test_kafkas_subscriber_hears_what_was_committed_and_nothing_else(kafka: Kafka) -> None:
    sizes = ("--rate", "200", "--per-transaction", "5", "--seconds", "2")
    sinks = ("--sink", "kafka", "--sink", "kafka-exactly-once", "--broker", kafka.bootstrap)
    report = _bench("--quick", "--no-limit", "--mode", "stream-pgoutput", "--scenario", "steady", *sinks, *sizes)
    assert len(report["measurements"]) == 2
    for steady in report["measurements"]:
        assert steady["stored"] == steady["rows"] > 0
        assert (steady["duplicates_seen"], steady["missing"]) == (0, 0)
        assert 0 < steady["latency"]["events"] <= steady["rows"]
        assert 0 < steady["latency"]["p50_ms"] <= steady["latency"]["max_ms"]


def test_your_own_servers_are_left_as_they_were(postgres: Postgres, kafka: Kafka) -> None:
    servers = ("--dsn", postgres.dsn(), "--broker", kafka.bootstrap)
    report = _bench(
        "--scenario", "backlog", "--sink", "kafka-exactly-once", "--no-limit", "--rows", str(ROWS), *servers
    )
    (relay,) = report["measurements"]
    assert (relay["stored"], relay["missing"], relay["duplicates_seen"]) == (ROWS, 0, 0)
    assert relay["cpu_seconds"]["postgres"] is None  # not ours to look into
    with psycopg.connect(postgres.dsn(), autocommit=True) as session:
        for query in (
            "SELECT datname FROM pg_database WHERE datname LIKE 'relay_bench%'",
            "SELECT slot_name FROM pg_replication_slots WHERE slot_name LIKE 'relay_bench%'",
        ):
            assert session.execute(query.encode()).fetchall() == []
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    assert wait_until(
        lambda: not [name for name in admin.list_topics(timeout=10.0).topics if name.startswith("relay_bench")], 30.0
    )


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
