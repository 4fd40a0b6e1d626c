"""Where the servers come from. One that cannot be had fails the test; it is never skipped.

`RELAY_TEST_SERVICES=embedded` (default) starts private servers; `docker` starts containers (testcontainers). An address
wins over both: `RELAY_TEST_POSTGRES_DSN`, `…_POSTGRES16_DSN`, `…_POSTGRES15_DSN`, `…_NATS_URL`, `…_KAFKA_BOOTSTRAP`.
Servers that a test may break (`own_…`) are always private ones.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping

import pytest

from relay.embedded import EmbeddedError
from relay.embedded.process import wait_until


def given(name: str) -> str:
    """What the caller said in `RELAY_TEST_<name>`, or nothing."""
    return os.environ.get(f"RELAY_TEST_{name}", "")


def in_docker() -> bool:
    services = given("SERVICES") or "embedded"
    if services not in {"embedded", "docker"}:
        pytest.fail(f"RELAY_TEST_SERVICES={services!r}: it is embedded or docker", pytrace=False)
    return services == "docker"


@contextlib.contextmanager
def loudly() -> Iterator[None]:
    """Say what is missing and how to get it, instead of where the code noticed."""
    try:
        yield
    except EmbeddedError as error:
        pytest.fail(f"{error}\n{error.hint}", pytrace=False)


@contextlib.contextmanager
def container(
    image: str,
    port: int,
    ready: Callable[[str], bool],
    *,
    command: str = "",
    environment: Mapping[str, str] | None = None,
    host_port: int | None = None,
) -> Iterator[str]:
    """A container until the block ends; gives `host:port` when `ready` says yes to it."""
    from testcontainers.core.container import DockerContainer

    box = DockerContainer(image)
    box = box.with_bind_ports(port, host_port) if host_port else box.with_exposed_ports(port)
    if command:
        box = box.with_command(command)
    for name, value in (environment or {}).items():
        box = box.with_env(name, value)
    with box:
        address = f"{box.get_container_host_ip()}:{box.get_exposed_port(port)}"
        if not wait_until(lambda: ready(address), 60.0, 0.2):
            pytest.fail(f"{image} was not ready within 60 s:\n{box.get_logs()}", pytrace=False)
        yield address
