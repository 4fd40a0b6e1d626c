"""Results on a stdout that is not as one wishes: another encoding, a full disk, nobody who reads. Never a traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from relay.cli_frame import show
from relay.finding import Finding, render
show([Finding("error", "tàble", "lacks …", "do → it")], render, json=sys.argv[1:] == ["--json"])
"""


def ran(
    command: list[str], encoding: str = "utf-8", stdout: int = subprocess.PIPE
) -> subprocess.CompletedProcess[bytes]:
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    return subprocess.run(
        [sys.executable, *command], stdout=stdout, stderr=subprocess.PIPE, env=environment, check=False, timeout=60
    )


@pytest.mark.parametrize(
    ("encoding", "shown"),
    [("utf-8", ["✗", "tàble", "lacks …", "→ do → it"]), ("latin1", ["?", "tàble", "lacks ?", "? do ? it"])],
)
def test_a_character_that_stdout_lacks_is_replaced(encoding: str, shown: list[str]) -> None:
    done = ran(["-c", PROGRAM], encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [part for part in shown if part not in done.stdout.decode(encoding)] == []


@pytest.mark.parametrize("encoding", ["utf-8", "latin1", "ascii"])
def test_json_loses_nothing_by_it(encoding: str) -> None:
    done = ran(["-c", PROGRAM, "--json"], encoding)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode(encoding)) == [
        {"level": "error", "subject": "tàble", "message": "lacks …", "remedy": "do → it"}
    ]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("command", [["version"], ["version", "--json"], ["check", "--show-config"], ["run", "--help"]])
def test_a_full_disk_is_one_sentence(command: list[str]) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        done = ran(["-m", "relay", *command], stdout=full)
    finally:
        os.close(full)
    said = b"error: the result cannot be written to stdout: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("command", [["version"], ["version", "--json"]])
def test_nobody_reads(command: list[str]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = ran(["-m", "relay", *command], stdout=writer)
    finally:
        os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_a_configuration_in_toml_stays_utf8(tmp_path: Path) -> None:
    given = tmp_path / "application.properties"
    given.write_text(
        "debezium.source.connector.class=io.debezium.connector.postgresql.PostgresConnector\n"
        "debezium.source.unheard.of=größe→1\n"
        "debezium.transforms=outbox\n"
        "debezium.transforms.outbox.type=io.debezium.transforms.outbox.EventRouter\n"
        "debezium.sink.type=kafka\n",
        "utf-8",
    )
    done = ran(["-m", "relay", "import-debezium", str(given)], "latin1")
    assert (done.returncode, done.stderr) == (0, b"")
    assert "größe→1" in done.stdout.decode("utf-8")
