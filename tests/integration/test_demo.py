"""`relay demo` as a user starts it: it counts honestly, survives kill -9, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from relay.embedded.process import wait_until


class Demo:
    """A demo in a folder of its own, which must be empty when it is over."""

    def __init__(self, folder: Path, log: Path, *options: str) -> None:
        self.folder = folder
        self._log = log
        # Settings of the user's own relay must not reach the demo's.
        foreign = {"RELAY_DATABASE__DSN": "postgresql://nobody@127.0.0.1:1/production"}
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "relay", "demo", "--json", *options],
                env={**os.environ, "TMPDIR": str(folder), **foreign},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )

    @property
    def talk(self) -> str:
        return self._log.read_text()

    def until(self, word: str) -> None:
        assert wait_until(lambda: word in self.talk or self.process.poll() is not None, 120.0)
        assert self.process.poll() is None, self.talk

    def end(self) -> str:
        """Wait for its end; returns what it printed."""
        try:
            return self.process.communicate(timeout=240)[0]
        finally:
            self.process.kill()

    def count(self) -> dict[str, Any]:
        """Wait for its end; returns what it counted, which must be what was promised."""
        output = self.end()
        assert self.process.returncode == 0, self.talk
        counted: dict[str, Any] = json.loads(output)
        assert counted["committed"] > 0, self.talk
        assert counted["delivered"] == counted["committed"], self.talk
        wrong = {name: counted[name] for name in ("lost", "uncommitted_delivered", "out_of_order") if counted[name]}
        assert not wrong and counted["ok"], self.talk
        assert self.leftovers() == []
        return counted

    def leftovers(self) -> list[str]:
        """Files, and processes that were started with a path in the folder."""
        found = [str(path) for path in self.folder.iterdir()]
        for process in psutil.process_iter(["cmdline"]):
            command = " ".join(process.info["cmdline"] or ())
            if str(self.folder) in command:
                found.append(command)
        return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Demo]]:
    # Open to the account that Postgres runs as, which pytest's own folders are not.
    folder = Path(tempfile.mkdtemp(prefix="demo-"))
    folder.chmod(0o755)
    started: list[Demo] = []

    def start(*options: str) -> Demo:
        started.append(Demo(folder, tmp_path / "demo.log", *options))
        return started[-1]

    yield start
    for demo in started:
        demo.end()
    shutil.rmtree(folder)


def test_it_delivers_what_was_committed_and_nothing_else(start: Callable[..., Demo]) -> None:
    counted = start("--seconds", "5").count()
    assert counted["rolled_back"] > 0
    assert counted["kills"] == 0
    assert counted["latency_seconds"]["p50"] <= counted["latency_seconds"]["p99"] <= counted["latency_seconds"]["max"]


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G3")
def test_nothing_is_lost_when_the_relay_is_killed_again_and_again(start: Callable[..., Demo]) -> None:
    counted = start("--seconds", "8", "--chaos", "--kill-every", "2").count()
    assert counted["kills"] > 0


def test_kafka(start: Callable[..., Demo]) -> None:
    start("--seconds", "3", "--kafka").count()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_closes_the_shop_and_still_counts(start: Callable[..., Demo], number: signal.Signals) -> None:
    demo = start()
    demo.until("delivered")
    demo.process.send_signal(number)
    demo.count()


def test_a_signal_while_it_starts_leaves_nothing_behind(start: Callable[..., Demo]) -> None:
    demo = start()
    demo.until("starting nats-server")
    demo.process.send_signal(signal.SIGINT)
    demo.end()
    assert demo.process.returncode == 130, demo.talk
    assert demo.leftovers() == []


def test_even_a_killed_demo_leaves_nothing_behind(start: Callable[..., Demo]) -> None:
    demo = start()
    demo.until("delivered")
    demo.process.kill()
    demo.end()
    assert wait_until(lambda: demo.leftovers() == [], 90.0), demo.leftovers()


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['psutil'] = None; from relay.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "demo"], capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert "pip install 'pg-outbox-relay[embedded]'" in done.stderr
    assert "Traceback" not in done.stderr
