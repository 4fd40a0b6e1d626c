"""nats-server for tests. A server of one's own starts in some 50 ms: prefer `own_nats` where subjects could clash.

The version is `current`, the one that is installed, or one of `old_nats`.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from relay.embedded import NatsCluster, NatsServer
from tests import old_nats
from tests.fix_services import container, given, in_docker, loudly


@dataclass(frozen=True, slots=True)
class Nats:
    """A running server with JetStream."""

    url: str


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), timeout=2.0) as probe:
            probe.settimeout(2.0)
            return probe.recv(4) == b"INFO"
    except OSError:
        return False


def _binary(version: str) -> Path | None:
    return None if version == "current" else old_nats.binary(version)


@pytest.fixture(scope="session")
def nats() -> Iterator[Nats]:
    """A server that the session shares: name streams and subjects by the fixture `prefix`."""
    if url := given("NATS_URL"):
        yield Nats(url)
    elif in_docker():
        with container(given("NATS_IMAGE") or "nats:2", 4222, _answers, command="-js") as address:
            yield Nats(f"nats://{address}")
    else:
        with loudly(), NatsServer() as server:
            yield Nats(server.url)


@pytest.fixture
def start_nats() -> Iterator[Callable[..., NatsServer]]:
    """Start servers with a configuration of the test's own; closed after the test."""
    with ExitStack() as stack:

        def start(config: str = "", version: str = "current") -> NatsServer:
            with loudly():
                return stack.enter_context(NatsServer(config, binary=_binary(version)))

        yield start


@pytest.fixture
def own_nats(start_nats: Callable[..., NatsServer]) -> NatsServer:
    """A server that the test may stop, kill, freeze."""
    return start_nats()


@pytest.fixture
def nats_cluster() -> Iterator[NatsCluster]:
    """Three servers with a JetStream leader, each of which the test may stop, kill, freeze."""
    with loudly(), NatsCluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster_of(request: pytest.FixtureRequest) -> Iterator[NatsCluster]:
    """The same, of a version that the test names as its parameter, for all tests of a file: leave it healthy."""
    with loudly(), NatsCluster(binary=_binary(request.param)) as cluster:
        yield cluster
