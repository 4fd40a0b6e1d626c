"""Other tools through the whole of `relay bench`, tiny, on real servers. No figure is judged, nothing is fetched."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers import install
from tests.fix_kafka import Kafka

ROWS = 2000
LACKING = install.missing()


def _bench(*arguments: str, **environment: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "relay", "bench", "--json", "--no-limit", "--rows", str(ROWS), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, env=os.environ | environment
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _drained(report: dict[str, Any], name: str) -> None:
    """Every row arrived once, and the result says who that was."""
    assert not report.get("left_open")
    relay, peer = report["measurements"]
    assert (relay["tool"], peer["tool"]) == ("relay", name)
    assert peer["stored"] == peer["rows"] == ROWS
    assert peer["start_to_first_seconds"] > 0
    assert peer["peak_rss_bytes"] > 10_000_000
    assert all(each["correct"] for each in report["summaries"])
    (facts,) = [facts for label, facts in report["tools"].items() if label.startswith(f"{name},")]
    assert facts["version"] and facts["configuration"] and facts["command"]


def test_poller_to_jetstream_while_another_is_not_installed(tmp_path: Path) -> None:
    peers = ("--peer", "poller", "--peer", "debezium-lean")
    report = _bench("--scenario", "backlog", *peers, XDG_CACHE_HOME=str(tmp_path))
    ((what, why),) = report.pop("left_open").items()
    assert what == "backlog, debezium-lean, jetstream"
    assert "not installed" in why and "make peers" in why
    assert not list(tmp_path.iterdir())  # nothing was fetched
    _drained(report, "poller")


def test_poller_to_kafka(kafka: Kafka) -> None:
    options = ("--sink", "kafka", "--broker", kafka.bootstrap)
    _drained(_bench("--scenario", "backlog", "--peer", "poller", *options), "poller")


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(LACKING), reason=f"{LACKING}: not installed here; `make peers` does it")
def test_debezium_to_jetstream() -> None:
    _drained(_bench("--scenario", "backlog", "--peer", "debezium-lean"), "debezium-lean")


@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(LACKING), reason=f"{LACKING}: not installed here; `make peers` does it")
def test_debezium_to_kafka(kafka: Kafka) -> None:
    options = ("--sink", "kafka", "--broker", kafka.bootstrap)
    _drained(_bench("--scenario", "backlog", "--peer", "debezium-default", *options), "debezium-default")
