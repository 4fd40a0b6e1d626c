"""`relay run` in its usual form is understood as the command line's library would; everything else is left to that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from relay import daemon
from relay.cli import app

WORDS = ["run", "--config", "-c", "--config=b.toml", "-cb.toml", "--from-now", "a.toml", "--help", "--", "", "status"]


@given(st.lists(st.sampled_from(WORDS), max_size=5).map(lambda words: ["run", *words]))
def test_the_usual_form_means_what_the_library_reads_in_it(words: list[str]) -> None:
    asked = daemon.usual(words)
    if asked is None:
        return
    read: list[tuple[Path | None, bool]] = []

    def run(config: Path | None = None, *, from_now: bool = False) -> None:
        read.append((config, from_now))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(daemon, "run", run)
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert read == [asked]


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["run"], (None, False)),
        (["run", "--config", "a.toml"], (Path("a.toml"), False)),
        (["run", "-c", "a.toml", "--from-now"], (Path("a.toml"), True)),
        (["run", "--config=a.toml"], (Path("a.toml"), False)),
        (["run", "--config"], None),
        (["run", "--config", ""], None),
        (["run", "--help"], None),
        (["run", "a.toml"], None),
        (["status"], None),
        ([], None),
    ],
)
def test_forms(words: list[str], asked: Any) -> None:
    assert daemon.usual(words) == asked


def test_a_running_relay_has_not_loaded_what_only_other_commands_need() -> None:
    code = (
        "import sys, relay.__main__\n"
        "from relay import apart\n"
        "apart.load(None)\n"
        "import relay.sink.jetstream, relay.sink.kafka\n"
        "print(*{'typer', 'rich', 'aiohttp', 'prometheus_client', 'jsonschema', 'pydantic'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"
