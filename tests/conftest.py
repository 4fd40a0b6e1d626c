"""The tests' real parts: `fix_postgres`, `fix_nats`, `fix_kafka`, `fix_proxy`; `fix_services` says where from.

The environment of whoever runs the tests must not reach the code under test, except what is meant for the tests.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import tempfile
from pathlib import Path

import pytest

from relay.embedded import process

pytest_plugins = ["tests.fix_postgres", "tests.fix_nats", "tests.fix_kafka", "tests.fix_proxy", "tests.certificates"]

for _name in list(os.environ):
    if _name.startswith(("RELAY_", "PG")) and not _name.startswith("RELAY_TEST_"):
        del os.environ[_name]

# Who runs the tests in the background of a script ignores Ctrl-C, and processes that tests start would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Servers' data in memory, where there is plenty: hundreds of databases come and go, which is slow work for a disk.
if "TMPDIR" not in os.environ and Path("/dev/shm").is_dir() and shutil.disk_usage("/dev/shm").free > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # tmp_path outlives the tests: not there
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"

# Workers that draw ports at the same time never draw the same one.
_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
process._PORTS = range(15000 + _worker * 2000, 17000 + _worker * 2000)


@pytest.fixture
def prefix() -> str:
    """A name that no other test has: for streams, subjects, topics and slots on servers that tests share."""
    return f"t{secrets.token_hex(4)}"
