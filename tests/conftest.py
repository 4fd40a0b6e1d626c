"""The tests' real parts: `fix_postgres`, `fix_nats`, `fix_kafka`, `fix_proxy`; `fix_services` says where from.

The environment of whoever runs the tests must not reach the code under test, except what is meant for the tests.
"""

from __future__ import annotations

import os
import secrets

import pytest

pytest_plugins = ["tests.fix_postgres", "tests.fix_nats", "tests.fix_kafka", "tests.fix_proxy", "tests.certificates"]

for _name in list(os.environ):
    if _name.startswith(("RELAY_", "PG")) and not _name.startswith("RELAY_TEST_"):
        del os.environ[_name]


@pytest.fixture
def prefix() -> str:
    """A name that no other test has: for streams, subjects, topics and slots on servers that tests share."""
    return f"t{secrets.token_hex(4)}"
