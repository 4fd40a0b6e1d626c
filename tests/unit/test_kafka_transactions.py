"""What Kafka's exactly-once mode decides without a broker."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from relay.config import Config
from relay.errors import EventRejected, ProtocolError, SetupError, SinkUnavailable
from relay.sink.kafka_policy import (
    Option,
    producer_options,
    transactional_id,
    transactional_options,
    translate_transaction,
)
from relay.sink.kafka_readback import consumer_options

_USER: dict[str, Option] = {
    "bootstrap.servers": "b:9092",
    "sasl.username": "u",
    "linger.ms": 3,
    "compression.type": "zstd",
}


@pytest.mark.parametrize("code", [KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH])
def test_a_producer_that_was_fenced_tries_anew_and_says_why(code: int) -> None:
    failure = translate_transaction(KafkaError(code), "commit")
    assert isinstance(failure, SinkUnavailable)
    assert "took over" in str(failure) and "transaction.timeout.ms" in str(failure)  # they cannot be told apart
    assert "transactional_id" in failure.hint and "transaction.timeout.ms" in failure.hint


def test_an_unknown_error_stops_unless_the_transaction_can_be_aborted() -> None:
    code = KafkaError.INVALID_COMMIT_OFFSET_SIZE
    assert isinstance(translate_transaction(KafkaError(code), "x"), ProtocolError)
    assert isinstance(translate_transaction(KafkaError(code, txn_requires_abort=True), "x"), SinkUnavailable)
    assert isinstance(translate_transaction(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE), "x"), EventRejected)


def test_a_fatal_error_that_only_a_person_can_cure_is_not_tried_again() -> None:
    error = KafkaError(KafkaError.INVALID_TRANSACTION_TIMEOUT, fatal=True)
    failure = translate_transaction(error, "Kafka does not give the transactional id")
    assert isinstance(failure, SetupError)
    assert "transaction.timeout.ms" in failure.hint


def test_options_of_a_transactional_producer() -> None:
    options = transactional_options(producer_options(_USER), _USER, "me")
    assert options["transactional.id"] == "me"
    assert options["enable.idempotence"] is True
    assert "enable.gapless.guarantee" not in options
    assert "delivery.timeout.ms" not in options  # librdkafka takes the transaction's
    kept: dict[str, Option] = {**_USER, "delivery.timeout.ms": 0}
    assert transactional_options(producer_options(kept), kept, "me")["delivery.timeout.ms"] == 0


def test_options_of_the_reader() -> None:
    options = consumer_options(_USER, "me:1")
    assert options["isolation.level"] == "read_committed"
    assert options["sasl.username"] == "u"
    assert not {"linger.ms", "compression.type"} & options.keys()


def test_the_transactional_id_is_plain() -> None:
    assert transactional_id("outbox relay:7123") == "outbox-relay-outbox-relay-7123"


def test_without_the_header_id_nothing_could_be_read_back() -> None:
    sink = {"kind": "kafka", "kafka": {"mode": "exactly-once", "options": {"bootstrap.servers": "b:9092"}}}
    database = {"dsn": "postgresql://x/y"}
    Config.model_validate({"database": database, "sink": sink})
    with pytest.raises(ValueError, match="needs the header id"):
        Config.model_validate({"database": database, "sink": sink, "routing": {"headers": ["type"]}})
