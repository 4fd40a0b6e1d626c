"""The Kafka sink's decisions without a broker: options that would break a promise, and what each error means."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from relay.config.sink import legal_topic
from relay.errors import (
    AuthError,
    ConfigError,
    EventRejected,
    OperatorError,
    ProtocolError,
    RelayError,
    SetupError,
    SinkUnavailable,
)
from relay.sink.kafka_partition import HASHES
from relay.sink.kafka_policy import DEFAULTS, Option, producer_options, topic_missing, translate

SERVERS: dict[str, Option] = {"bootstrap.servers": "127.0.0.1:9092"}


def test_users_options_override_and_extend() -> None:
    options = producer_options(SERVERS | {"linger.ms": 20, "client.id": "mine", "compression.codec": "zstd"})
    assert options == DEFAULTS | SERVERS | {"linger.ms": 20, "client.id": "mine", "compression.type": "zstd"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable.idempotence", False),
        ("enable.idempotence", "false"),
        ("enable.gapless.guarantee", "false"),
        ("acks", 1),
        ("acks", "0"),
        ("request.required.acks", "1"),
        ("delivery.timeout.ms", 120_000),
        ("message.timeout.ms", "5000"),
        ("retries", 0),
        ("message.send.max.retries", 3),
        ("max.in.flight.requests.per.connection", 6),
        ("max.in.flight", "100"),
        ("transactional.id", "x"),
        ("partitioner", "random"),
        ("partitioner", "no such"),
        ("delivery.report.only.error", True),
        ("bootstrap.servers", " "),
    ],
)
def test_an_option_that_breaks_a_promise_is_refused(name: str, value: Option) -> None:
    with pytest.raises(ConfigError, match=f"sink.kafka.options.{name}"):
        producer_options(SERVERS | {name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("enable.idempotence", "true"),
        ("acks", "-1"),
        ("acks", -1),
        ("delivery.timeout.ms", 0),
        ("retries", 2147483647),
        ("max.in.flight", 1),
        ("partitioner", "murmur2"),
        ("partitioner", "fnv1a_random"),
        ("delivery.report.only.error", "false"),
    ],
)
def test_the_same_option_with_a_harmless_value(name: str, value: Option) -> None:
    assert producer_options(SERVERS | {name: value})


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        producer_options({"acks": 1, "retries": 0, "linger.ms": 5, "queue.buffering.max.ms": 6})
    assert len(caught.value.faults) == 4  # acks, retries, two names of one option, no servers
    assert caught.value.hint


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, EventRejected),
        (KafkaError.RECORD_LIST_TOO_LARGE, EventRejected),
        (KafkaError.INVALID_RECORD, EventRejected),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, SetupError),
        (KafkaError._UNKNOWN_TOPIC, SetupError),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, AuthError),
        (KafkaError.CLUSTER_AUTHORIZATION_FAILED, AuthError),
        (KafkaError._AUTHENTICATION, AuthError),
        (KafkaError.POLICY_VIOLATION, OperatorError),
        (KafkaError.INVALID_TRANSACTION_TIMEOUT, SetupError),
        (KafkaError.INVALID_PARTITIONS, SetupError),
        (KafkaError.INVALID_REPLICATION_FACTOR, SetupError),
        (KafkaError._ALL_BROKERS_DOWN, SinkUnavailable),
        (KafkaError._TRANSPORT, SinkUnavailable),
        (KafkaError._NOENT, SinkUnavailable),
        (KafkaError.NOT_ENOUGH_REPLICAS, SinkUnavailable),
        (KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, SinkUnavailable),
        (KafkaError._GAPLESS_GUARANTEE, SinkUnavailable),
        (KafkaError._PURGE_INFLIGHT, SinkUnavailable),
        (KafkaError.UNSTABLE_OFFSET_COMMIT, ProtocolError),  # nothing a producer should ever hear
        (KafkaError._BAD_MSG, ProtocolError),
    ],
)
def test_error_classes(code: int, kind: type[RelayError]) -> None:
    error = translate(KafkaError(code, "what the broker said"), "Kafka")
    assert type(error) is kind
    assert "what the broker said" in str(error)
    assert error.hint


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (KafkaError._SSL, "SSL handshake failed: error:0A000086:SSL routines::certificate verify failed", AuthError),
        (KafkaError._TRANSPORT, "Receive failed: ssl/tls alert bad certificate: SSL alert number 42", AuthError),
        (KafkaError._SSL, "SSL handshake failed: Disconnected: connecting to a PLAINTEXT listener?", SinkUnavailable),
        (KafkaError._TRANSPORT, "Connect to 127.0.0.1 failed: Connection refused", SinkUnavailable),
        (KafkaError._AUTHENTICATION, "Failed to acquire SASL OAUTHBEARER token: Could not connect", SinkUnavailable),
        (KafkaError._AUTHENTICATION, 'Failed to acquire SASL OAUTHBEARER token: {"error":"invalid_client"}', AuthError),
    ],
)
def test_a_refusal_is_told_from_an_outage(code: int, text: str, kind: type[RelayError]) -> None:
    found = translate(KafkaError(code, text), "Kafka")
    assert type(found) is kind and found.hint


def test_what_nobody_listed_is_transient_only_if_librdkafka_says_so() -> None:
    assert isinstance(translate(KafkaError(9999, "new", retriable=True), "Kafka"), SinkUnavailable)
    assert isinstance(translate(KafkaError(9999, "new"), "Kafka"), ProtocolError)


@pytest.mark.parametrize(
    ("name", "legal"),
    [
        ("events.order_made-2", True),
        ("", False),
        (".", False),
        ("..", False),
        ("a b", False),
        ("é", False),
        ("x" * 250, False),
    ],
)
def test_topic_names(name: str, legal: bool) -> None:
    assert legal_topic(name) is legal


def test_a_missing_topic_names_its_remedies() -> None:
    error = topic_missing(["a", "b"])
    assert "a, b" in str(error)
    assert "--create --topic a" in error.hint
    assert "--create --topic b" in error.hint
    assert "create_topics = true" in error.hint


def test_partition_hashes() -> None:
    """Vectors from the unit tests of Kafka (murmur2) and of librdkafka (fnv1a), and CRC-32's check value."""
    assert HASHES["murmur2_random"](b"21") == -973932308 & 0x7FFFFFFF
    assert HASHES["murmur2_random"](b"foobar") == -790332482 & 0x7FFFFFFF
    assert HASHES["fnv1a"](b"kafka") == 0xD33C4E1
    assert HASHES["consistent"](b"123456789") == 0xCBF43926
