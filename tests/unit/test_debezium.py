"""Converting Debezium's configurations: nothing is dropped in silence, no secret is shown, and the result loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relay.config import Config, load
from relay.debezium import convert
from relay.debezium_options import ROUTER, properties
from relay.errors import ConfigError

FIXTURES = Path(__file__).parents[1] / "fixtures" / "debezium"


def loaded(folder: Path, text: str) -> Config:
    path = folder / "relay.toml"
    path.write_text(text)
    return load(path, {})


def connector(**options: str) -> str:
    router = {"transforms": "outbox", "transforms.outbox.type": ROUTER}
    return json.dumps({"name": "Shop-Connector", "config": {**router, **options}})


def test_debezium_server_to_jetstream(tmp_path: Path) -> None:
    source = (FIXTURES / "application.properties").read_text()
    text = convert([("application.properties", source)])
    config = loaded(tmp_path, text)
    assert config.database.conninfo() == "postgresql://dbz@db.internal:5433/shop?sslmode=require"
    assert (config.source.slot, config.source.publication, config.source.plugin) == ("shop", "shop_pub", "pgoutput")
    (outbox,) = config.outbox
    assert outbox.table == "sales.outbox"
    assert (outbox.columns.id, outbox.columns.aggregate_type, outbox.columns.aggregate_id) == (
        "event_id",
        "kind",
        "ref",
    )
    assert outbox.columns.payload == "body"
    assert outbox.header_columns == {"tenant": "tenant", "eventType": "type"}
    assert outbox.routing is not None
    assert (outbox.routing.topic, outbox.routing.format) == ("shop.{aggregate_type}.events", "payload")
    assert outbox.routing.headers == ("id", "type")
    assert config.sink.kind == "jetstream"
    assert config.sink.jetstream.servers == ("nats://n1:4222", "nats://n2:4222")
    (stream,) = config.sink.jetstream.streams
    assert (stream.name, stream.subjects, stream.create) == ("SHOP", ("shop.>",), True)
    assert "hunter2" not in text and "s3cret" not in text
    assert "relay setup --from-slot shop --publication shop_pub" in text


def test_every_option_is_accounted_for(tmp_path: Path) -> None:
    """What is neither in the result nor in the notes would have been dropped."""
    for name in ("application.properties", "connector.json"):
        source = (FIXTURES / name).read_text()
        text = convert([(name, source)])
        loaded(tmp_path, text)
        options = properties(source) if name.endswith("properties") else json.loads(source)["config"]
        for key, value in options.items():
            last = key.removeprefix("debezium.source.").removeprefix("debezium.sink.").removeprefix("debezium.")
            last = last.removeprefix("transforms.outbox.")
            known = last in text or str(value) in text or all(part in text for part in str(value).split(","))
            assert known or last in TRANSLATED, f"{name}: {key}"


TRANSLATED = {
    "type",  # of the transform
    "transforms",
    "database.password",
    "table.include.list",  # a pattern that is a plain name
    "nats-jetstream.auth.password",
    "nats-jetstream.url",
    "nats-jetstream.create-stream",
    "route.topic.regex",  # the default form
    "route.topic.replacement",
    "table.fields.additional.placement",
    "key.converter",
    "value.converter",
    "value.converter.schemas.enable",
    "table.expand.json.payload",
}


def test_a_connector_to_kafka(tmp_path: Path) -> None:
    text = convert([("connector.json", (FIXTURES / "connector.json").read_text())])
    config = loaded(tmp_path, text)
    assert config.relay.name == "shop_outbox_connector"
    assert [outbox.table for outbox in config.outbox] == ["public.outboxevent", "public.audit_outbox"]
    assert config.sink.kind == "kafka"
    assert config.sink.kafka.options["linger.ms"] == "5"
    for untranslated in (
        "shard:partition",
        "tracing.span.context.field = ctx",
        "table.field.event.schema.version = v",
        "transforms.mask.type",
        "nobody.knows = 1",
        "key format = JsonConverter",
    ):
        assert untranslated in text, untranslated
    assert "heartbeat.interval.ms = 10000   (an idle outbox never pins WAL" in text
    assert "bootstrap.servers is not in the file" in text


@pytest.mark.parametrize(
    ("regex", "replacement", "topic"),
    [
        ("(?<routedByValue>.*)", "outbox.event.${routedByValue}", "outbox.event.{aggregate_type}"),
        ("(.*)", "shop.$1", "shop.{aggregate_type}"),
        ("(?<x>.*)", "${x}", "{aggregate_type}"),
        ("(?<x>.*)", "all", "all"),
        ("(?<x>.*)-v1", "shop.${x}", None),
        ("(.*)", "shop.${other}", None),
    ],
)
def test_topics(tmp_path: Path, regex: str, replacement: str, topic: str | None) -> None:
    options = {"transforms.outbox.route.topic.regex": regex, "transforms.outbox.route.topic.replacement": replacement}
    text = convert([("c.json", connector(**options))])
    (outbox,) = loaded(tmp_path, text).outbox
    assert outbox.routing is not None
    assert outbox.routing.topic == (topic or "outbox.event.{aggregate_type}")
    assert (f"route.topic.regex = {regex}" in text) == (topic is None)


def test_a_slot_of_another_plugin_is_not_continued(tmp_path: Path) -> None:
    text = convert([("c.json", connector(**{"plugin.name": "decoderbufs", "slot.name": "old"}))])
    assert loaded(tmp_path, text).source.slot == "outbox_relay"
    assert "--from-slot" not in text
    assert "slot.name = old" in text


def test_without_a_router_there_is_nothing_to_replace() -> None:
    with pytest.raises(ConfigError, match="no outbox event router"):
        convert([("c.json", json.dumps({"config": {"connector.class": "x"}}))])
    with pytest.raises(ConfigError, match="not JSON"):
        convert([("c.json", "{")])


def test_properties_as_java_reads_them() -> None:
    text = "# no\n! no\na=1\nb : two words\nc\\=d = \\u00fc\\\n   x\ne\n"
    assert properties(text) == {"a": "1", "b": "two words", "c=d": "üx", "e": ""}
