"""Kafka for tests. It takes seconds to start: share it, and name topics by the fixture `prefix`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from relay.embedded import KafkaServer
from relay.embedded.kafka import one_node
from relay.embedded.process import free_port
from tests.fix_services import container, given, in_docker, loudly


@dataclass(frozen=True, slots=True)
class Kafka:
    """A running broker that does not create topics by itself."""

    bootstrap: str


def _answers(address: str) -> bool:
    try:
        return bool(AdminClient({"bootstrap.servers": address, "log_level": 0}).list_topics(timeout=2.0).brokers)
    except KafkaException:
        return False


def _environment(port: int) -> dict[str, str]:
    """The embedded broker's properties in the way the image takes them; clients come through the host's port."""
    properties = one_node(9092, 9093) | {
        "listeners": "PLAINTEXT://0.0.0.0:9092,CONTROLLER://127.0.0.1:9093",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
    }
    return {f"KAFKA_{name.upper().replace('.', '_')}": value for name, value in properties.items()}


@pytest.fixture(scope="session")
def kafka() -> Iterator[Kafka]:
    if bootstrap := given("KAFKA_BOOTSTRAP"):
        yield Kafka(bootstrap)
    elif in_docker():
        port = free_port()
        image = given("KAFKA_IMAGE") or "apache/kafka:4.1.0"
        with container(image, 9092, _answers, environment=_environment(port), host_port=port):
            yield Kafka(f"127.0.0.1:{port}")
    else:
        with loudly(), KafkaServer() as server:
            yield Kafka(server.bootstrap)


@pytest.fixture(scope="session")
def breakable_kafka() -> Iterator[KafkaServer]:
    with loudly(), KafkaServer() as server:
        yield server


@pytest.fixture
def own_kafka(breakable_kafka: KafkaServer) -> Iterator[KafkaServer]:
    """A broker that the test may stop, kill, freeze. The next test gets it again, running: use `prefix`."""
    with loudly():
        breakable_kafka.start()
        yield breakable_kafka
        breakable_kafka.thaw()
        breakable_kafka.start()
