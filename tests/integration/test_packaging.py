"""The wheel and the sdist: complete, and working in an environment that has nothing but them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from relay import __version__
from relay.config import plain_environment
from tests.fix_postgres import Database

ROOT = Path(__file__).parents[2]
SQL = sorted(path.name for path in (ROOT / "sql").glob("*.sql"))


def run(*command: str | Path, environment: dict[str, str] | None = None, folder: Path | None = None) -> str:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=plain_environment() | (environment or {}),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(kind: str, source: Path, target: Path) -> Path:
    """Build by the backend that pyproject.toml names, here at its locked version."""
    code = f"import sys, hatchling.build as b; print(b.build_{kind}(sys.argv[1]))"
    name = run(sys.executable, "-c", code, target, folder=source).splitlines()[-1]
    return target / name


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist: it holds everything that a build needs."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build("wheel", folder / f"pg_outbox_relay-{__version__}", folder)


def test_the_sdist_is_complete_and_no_more(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "README.md", "pyproject.toml", "relay/cli.py", *(f"sql/{name}" for name in SQL)} <= names
    assert not [name for name in names if name.startswith((".venv/", "dist/", ".git/")) or "__pycache__" in name]


def test_the_wheel_is_complete_and_no_more(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    info = f"pg_outbox_relay-{__version__}.dist-info"
    assert {"relay/py.typed", f"{info}/licenses/LICENSE", *(f"relay/sql/{name}" for name in SQL)} <= names
    assert {name.partition("/")[0] for name in names} == {"relay", info}


@pytest.mark.timeout(600)
def test_the_wheel_runs_in_a_clean_environment(wheel: Path, database: Database, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv")
    bin_ = tmp_path / "venv/bin"
    pip = [sys.executable, "-m", "pip", "--python", str(bin_ / "python"), "--disable-pip-version-check"]
    run(*pip, "install", "-q", "--no-compile", wheel)
    for command in (["version"], ["--help"], ["run", "--help"]):
        assert run(bin_ / "relay", *command, folder=tmp_path)
    assert run(bin_ / "relay", "version", folder=tmp_path) == f"relay {__version__}\n"
    run(bin_ / "relay", "setup", environment={"RELAY_DATABASE__DSN": database.dsn}, folder=tmp_path)
    assert database.query("SELECT count(*) FROM outbox_events") == [(0,)]
    assert database.query("SELECT pubname FROM pg_publication") == [("outbox_relay",)]
