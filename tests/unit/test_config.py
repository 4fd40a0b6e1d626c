"""Configuration: one file, one rule for the environment, all faults at once, no secret ever shown."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg import pq
from pydantic import TypeAdapter, ValidationError

from relay.config import Config, Duration, Positive, Size, load, mask_dsn, mask_url, read_secret
from relay.errors import ConfigError


def loaded(toml: str = "", tmp_path: Path | None = None, **environ: str) -> Config:
    path = None
    if toml:
        assert tmp_path is not None
        path = tmp_path / "relay.toml"
        path.write_text(toml, encoding="utf-8")
    return load(path, environ)


def faults(toml: str = "", tmp_path: Path | None = None, **environ: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        loaded(toml, tmp_path, **environ)
    assert refused.value.exit_code == 2
    assert "docs/configuration.md" in refused.value.hint
    return refused.value.faults


# The whole


def test_everything_has_a_default() -> None:
    config = loaded()
    assert config.relay.name == "outbox_relay"
    assert config.outbox[0].table == "public.outbox_events"
    assert config.sink.kafka.options == {"bootstrap.servers": "127.0.0.1:9092"}


def test_all_faults_are_told_at_once_each_with_its_path(tmp_path: Path) -> None:
    toml = """
    [relay]
    name = "No Spaces"
    [source]
    slot = "Upper"
    speed = "fast"
    [delivery]
    max_in_flight_events = 0
    max_in_flight_bytes = "lots"
    backoff_initial = "soon"
    [[outbox]]
    table = "public.a"
    [[outbox]]
    tabel = "public.b"
    [[sink.jetstream.streams]]
    subjects = ["events.>"]
    [sinks]
    """
    found = faults(toml, tmp_path, RELAY_LOG__LEVEL="loud", RELAY_SORUCE__SLOT="x")
    for path in (
        "relay.name: a name has 1 to 63",
        "source.slot: a name has 1 to 63",
        "source.speed: unknown key",
        "delivery.max_in_flight_events: ",
        "delivery.max_in_flight_bytes: not a size",
        "delivery.backoff_initial: not a duration",
        "outbox.1.tabel: unknown key",
        "sink.jetstream.streams.0.name: is required",
        "sinks: unknown key",
        "log.level: ",
        "RELAY_SORUCE__SLOT: unknown section",
    ):
        assert any(fault.startswith(path) for fault in found), (path, found)
    assert len(found) == 11


def test_relations_between_values_are_checked(tmp_path: Path) -> None:
    assert "backoff_initial must not exceed" in faults('[delivery]\nbackoff_initial = "2m"', tmp_path)[0]
    assert "a third of source.wal_sender_timeout" in faults('[checkpoint]\ninterval = "6s"', tmp_path)[0]
    assert "not both" in faults('[database]\ndsn = "host=db"\ndsn_file = "x"', tmp_path)[0]


@pytest.mark.parametrize(
    ("toml", "told"),
    [
        ("outbox = []", "outbox: at least one"),
        ('[[outbox]]\ntable = "a"\n[[outbox]]\ntable = "public.a"', "outbox: public.a is listed twice"),
        ('[[outbox]]\ntable = "a.b.c"', "outbox.0.table: write schema.table"),
        ('[[outbox]]\ntable = ""', "outbox.0.table: write schema.table"),
        ('[[outbox]]\ncolumns = { id = "" }', "outbox.0.columns: id cannot be empty"),
        ('[source]\npublication = ""', "source.publication: a publication's name has 1 to 63 bytes"),
        ('[source]\nwal_sender_timeout = "30d"', "source.wal_sender_timeout: must be at most"),
        ('[source]\nmode = "strem"', "source.mode: must be 'auto', 'stream' or 'poll'"),
        ("[poll]\nworkers = 'four'", "poll.workers: must be a whole number"),
        ("[poll]\nworkers = 0", "poll.workers: must be at least 1"),
        ("[checkpoint]\naudit = 'maybe'", "checkpoint.audit: must be true or false"),
        ("[relay]\nname = 7", "relay.name: must be a text"),
        ("poll = 3", "poll: must be a table"),
        ('[admin]\nlisten = "9464"', "admin.listen: write host:port"),
        ('[admin]\nlisten = "127.0.0.1:99999"', "admin.listen: "),
        ("[sink.jetstream]\nservers = []", "sink.jetstream.servers: at least one"),
        ('[sink.jetstream]\nservers = ["127.0.0.1:4222"]', "sink.jetstream.servers: "),
        ('[[sink.jetstream.streams]]\nname = "a.b"\nsubjects = ["x"]', "sink.jetstream.streams.0.name: a stream name"),
        ('[[sink.jetstream.streams]]\nname = "a"\nsubjects = ["a.>.b"]', "sink.jetstream.streams.0.subjects: 'a.>.b'"),
        ('[[sink.jetstream.streams]]\nname = "a"\nsubjects = ["a..b"]', "sink.jetstream.streams.0.subjects: 'a..b'"),
        ("[checkpoint]\ninterval = 0", "checkpoint.interval: "),
        ("[checkpoint]\nhistory_retention = inf", "checkpoint.history_retention: "),
        ("[checkpoint]\nhistory_retention = nan", "checkpoint.history_retention: "),
    ],
)
def test_a_wrong_value_is_named(toml: str, told: str, tmp_path: Path) -> None:
    assert any(fault.startswith(told) for fault in faults(toml, tmp_path)), faults(toml, tmp_path)


def test_a_missing_or_broken_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.toml", {})
    broken = tmp_path / "broken.toml"
    broken.write_text("[relay\n")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load(broken, {})
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"broken\.toml"):
        load(broken, {})


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        loaded().relay.name = "other"  # type: ignore[misc]


# The environment


def test_the_environment_wins_over_the_file(tmp_path: Path) -> None:
    toml = '[source]\nslot = "one"\npublication = "one"'
    config = loaded(toml, tmp_path, RELAY_SOURCE__SLOT="two", RELAY_CHECKPOINT__INTERVAL="250ms")
    assert (config.source.slot, config.source.publication) == ("two", "one")
    assert config.checkpoint.interval == 0.25


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("RELAY_SORUCE__SLOT", "unknown section"),
        ("RELAY_SOURCE_SLOT", "write RELAY_SOURCE__SLOT"),
        ("RELAY_SOURCE__SLTO", "source.slto: unknown key"),
        ("RELAY_SINK__JETSTREM__MODE", "sink.jetstrem: unknown key"),
    ],
)
def test_a_misspelt_variable_is_a_fault(name: str, told: str) -> None:
    assert told in "; ".join(faults("", None, **{name: "x"}))


def test_variables_of_others_are_none_of_our_business() -> None:
    loaded(PATH="/bin", RELAY_TEST_SERVICES="docker", RELAY="x", PGHOST="db")


def test_options_of_librdkafka_have_dots_again() -> None:
    config = loaded(
        RELAY_SINK__KAFKA__OPTIONS__BOOTSTRAP_SERVERS="kafka:9092",
        RELAY_SINK__KAFKA__OPTIONS__SASL_PASSWORD="secret",
        RELAY_SINK__KAFKA__OPTIONS__LINGER_MS="5",
    )
    assert config.sink.kafka.librdkafka() == {
        "bootstrap.servers": "kafka:9092",
        "sasl.password": "secret",
        "linger.ms": "5",
    }


def test_lists_are_words_or_json() -> None:
    words = loaded(RELAY_SINK__JETSTREAM__SERVERS="nats://a:4222, nats://b:4222,")
    listed = loaded(RELAY_SINK__JETSTREAM__SERVERS='["nats://a:4222", "nats://b:4222"]')
    assert words.sink.jetstream.servers == listed.sink.jetstream.servers == ("nats://a:4222", "nats://b:4222")


def test_tables_in_lists_are_json() -> None:
    config = loaded(
        RELAY_OUTBOX='[{"table": "shop.outbox", "columns": {"seq": ""}}]',
        RELAY_SINK__JETSTREAM__STREAMS='[{"name": "EVENTS", "subjects": "a.>,b.>"}]',
    )
    assert config.outbox[0].table == "shop.outbox"
    assert config.outbox[0].columns.seq == ""
    assert config.sink.jetstream.streams[0].subjects == ("a.>", "b.>")
    assert "RELAY_OUTBOX: not JSON" in faults(RELAY_OUTBOX="[{")[0]


def test_a_key_inside_a_list_cannot_be_set_alone(tmp_path: Path) -> None:
    found = faults('[[outbox]]\ntable = "a"', tmp_path, RELAY_OUTBOX__TABLE="b")
    assert "RELAY_OUTBOX" in found[0]
    assert "JSON" in found[0]


# Secrets

SECRET = "hunter2"


def secretive(tmp_path: Path) -> Config:
    toml = f"""
    [database]
    dsn = "postgresql://relay:{SECRET}@db/shop?sslpassword={SECRET}"
    [sink.jetstream]
    servers = ["nats://user:{SECRET}@127.0.0.1:4222"]
    user = "relay"
    password = "{SECRET}"
    token = "{SECRET}"
    [sink.kafka.options]
    "bootstrap.servers" = "kafka:9092"
    "sasl.username" = "relay"
    "sasl.password" = "{SECRET}"
    "ssl.key.password" = "{SECRET}"
    "ssl.key.pem" = "{SECRET}"
    "sasl.oauthbearer.client.secret" = "{SECRET}"
    "sasl.oauthbearer.config" = "{SECRET}"
    "sasl.oauthbearer.assertion.private.key.passphrase" = "{SECRET}"
    """
    return loaded(toml, tmp_path)


def test_secrets_are_masked_wherever_a_config_is_shown(tmp_path: Path) -> None:
    config = secretive(tmp_path)
    for shown in (repr(config), str(config), json.dumps(config.shown())):
        assert SECRET not in shown


def test_what_is_no_secret_stays_readable(tmp_path: Path) -> None:
    shown = secretive(tmp_path).shown()
    assert "host=db" in shown["database"]["dsn"]
    assert "user=relay" in shown["database"]["dsn"]
    assert shown["sink"]["kafka"]["options"]["bootstrap.servers"] == "kafka:9092"
    assert shown["sink"]["kafka"]["options"]["sasl.username"] == "relay"
    assert shown["sink"]["jetstream"]["servers"][0].endswith("@127.0.0.1:4222")


def test_secrets_are_used_as_they_are(tmp_path: Path) -> None:
    config = secretive(tmp_path)
    assert f"password={SECRET}" in config.database.conninfo()
    assert config.sink.kafka.librdkafka()["sasl.password"] == SECRET


@pytest.mark.parametrize(
    "environ",
    [
        {"RELAY_DATABASE__DSN": f"host=db password=my {SECRET}"},
        {"RELAY_DATABASE__DSN": SECRET},
        {"RELAY_DATABASE__DSN": f"postgresql://relay:{SECRET}%zz@db/shop"},
        {"RELAY_DATABASE__DSN": f"postgresql://relay:{SECRET}@db:port:1/shop?{SECRET}"},
        {"RELAY_DATABASE__DSN": f"host=db {SECRET}=1"},
        {"RELAY_DATABASE__DSN": f"host=db password='{SECRET}"},
        {"RELAY_SINK__JETSTREAM__SERVERS": f"nuts://user:{SECRET}@127.0.0.1:4222"},
        {"RELAY_SINK__KAFKA__OPTIONS": f'{{"sasl.password": "{SECRET}"'},
        {"RELAY_SINK__JETSTREAM__PASSWORD": SECRET, "RELAY_SINK__JETSTREAM__MODE": "x"},
    ],
)
def test_a_fault_never_quotes_a_secret(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as refused:
        load(None, environ)
    assert SECRET not in f"{refused.value} {refused.value!r} {refused.value.faults} {refused.value.hint}"
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_secrets_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text("host=db user=relay\n")
    (tmp_path / "password").write_text(f"{SECRET}\r\n")
    config = loaded(
        RELAY_DATABASE__DSN_FILE=str(tmp_path / "dsn"),
        RELAY_DATABASE__PASSWORD_FILE=str(tmp_path / "password"),
        RELAY_SINK__KAFKA__OPTIONS=json.dumps({"sasl.password": {"file": str(tmp_path / "password")}}),
    )
    assert "user=relay" in config.database.conninfo()
    assert f"password={SECRET}" in config.database.conninfo()
    assert config.sink.kafka.librdkafka() == {"sasl.password": SECRET}
    assert SECRET not in repr(config) + json.dumps(config.shown())


def test_a_secret_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none: cannot read the secret"):
        read_secret(tmp_path / "none")


def test_only_line_ends_are_taken_from_a_secret(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("  two words \n\n")
    assert read_secret(tmp_path / "secret") == "  two words "


def test_masks() -> None:
    assert SECRET not in mask_dsn(f"host=db password={SECRET} sslpassword={SECRET}")
    if pq.version() >= 180000:
        assert SECRET not in mask_dsn(f"host=db oauth_client_secret={SECRET}")
    assert mask_url(f"nats://{SECRET}@host:4222") == "nats://********@host:4222"
    assert mask_url("nats://host:4222") == "nats://host:4222"


# Durations, sizes, templates

_durations: TypeAdapter[float] = TypeAdapter(Duration)
_positives: TypeAdapter[float] = TypeAdapter(Positive)
_sizes: TypeAdapter[int] = TypeAdapter(Size)


@given(
    st.integers(0, 10**9), st.sampled_from([("us", 1e-6), ("ms", 1e-3), ("s", 1), ("m", 60), ("h", 3600), ("d", 86400)])
)
def test_durations_have_units(number: int, unit: tuple[str, float]) -> None:
    for text in (f"{number}{unit[0]}", f" {number} {unit[0]} "):
        assert math.isclose(_durations.validate_python(text), number * unit[1])


@given(st.floats(0, 10**9, allow_nan=False))
def test_a_plain_number_is_seconds(number: float) -> None:
    assert _durations.validate_python(number) == number


@given(st.integers(1, 10**9), st.sampled_from(["", "B", "KB", "MB", "GB", "KiB", "MiB", "GiB"]), st.booleans())
def test_sizes_have_units(number: int, unit: str, lower: bool) -> None:
    text = f"{number}{unit.lower() if lower else unit}"
    exponent = " KMG".index(unit[0]) if unit not in ("", "B") else 0
    assert _sizes.validate_python(text) == number * (1024 if "i" in unit else 1000) ** exponent


@given(st.text(max_size=12))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for adapter in (_durations, _sizes):
        parsed: Any
        try:
            parsed = adapter.validate_python(text)
        except ValidationError:
            continue
        assert parsed >= 0


@pytest.mark.parametrize("text", ["", "s", "-1s", "1 week", "1e3s", "1,5s", "inf", "nan", "1s1s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        _durations.validate_python(text)


@pytest.mark.parametrize("text", ["", "MB", "-1MB", "1.5GB", "5ib", "5k", "1TBB", "0"])
def test_other_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValidationError):
        _sizes.validate_python(text)


@pytest.mark.parametrize("value", [0, -1, "0s", math.inf, math.nan])
def test_what_must_be_positive_is_not_zero_and_not_endless(value: Any) -> None:
    with pytest.raises(ValidationError):
        _positives.validate_python(value)


@pytest.mark.parametrize("template", ["{topic}", "events.{aggregate_type}.{event_type}", "fixed", "{table}-{id}-{seq}"])
def test_templates(template: str) -> None:
    assert loaded(RELAY_ROUTING__TOPIC=template).routing.topic == template


@pytest.mark.parametrize(
    ("template", "told"),
    [
        ("{topik}", "unknown field {topik}; known are {topic}"),
        ("{}", "unknown field"),
        ("{topic", "unbalanced"),
        ("topic}", "unbalanced"),
        ("{{topic}}", "unbalanced"),
        ("{topic!r}", "unknown field"),
    ],
)
@pytest.mark.parametrize("key", ["topic", "fallback_topic", "key"])
def test_a_wrong_template_is_named(key: str, template: str, told: str) -> None:
    (fault,) = faults("", None, **{f"RELAY_ROUTING__{key.upper()}": template})
    assert fault.startswith(f"routing.{key}: ")
    assert told in fault


@pytest.mark.parametrize(
    ("toml", "paths"),
    [
        ('[sink]\nkind = "kafka"\n[sink.kafka]\npartitions = "x"\noptions = {}', ["sink.kafka.partitions", "sink"]),
        ("[sink.kafka.options]\nacks = [1]", ["sink.kafka.options.acks"]),
        (
            "[sink.kafka]\npartitions = 0\nreplication_factor = 0",
            ["sink.kafka.partitions", "sink.kafka.replication_factor"],
        ),
        ("[sink.kafka]\npartitions = -2", ["sink.kafka.partitions"]),
        (
            '[sink.kafka]\nposition_topic = "a b"\ntopics = ["fine", "é"]',
            ["sink.kafka.position_topic", "sink.kafka.topics"],
        ),
        ('[sink.kafka]\nposition_topic = ""', ["sink.kafka.position_topic"]),
        # The rule that a password needs a user would blame the wrong key.
        ('[sink.jetstream]\nuser = 5\npassword = "x"', ["sink.jetstream.user"]),
        (
            '[[outbox]]\ntable = 5\n[[outbox]]\ntable = "a.b"\n[[outbox]]\ntable = "a.b"\n[log]\nlevel = "x"',
            ["outbox.0.table", "log.level", "outbox"],
        ),
        ('[[sink.jetstream.streams]]\nname = "s"\nsubjects = []', ["sink.jetstream.streams.0.subjects"]),
    ],
)
def test_rules_over_several_keys_are_told_with_the_other_faults(tmp_path: Path, toml: str, paths: list[str]) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError) as caught:
        load(file, {})
    assert [fault.partition(":")[0] for fault in caught.value.faults] == paths


def test_kafka_needs_an_address_and_says_so_with_the_other_faults(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text('[sink]\nkind = "kafka"\n[sink.kafka.options]\n"linger.ms" = 5\n[delivery]\nmax_batch_events = 0\n')
    with pytest.raises(ConfigError) as caught:
        load(file, {})
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["sink", "delivery.max_batch_events"]
    assert "bootstrap.servers" in caught.value.faults[0]
    load(file, {"RELAY_SINK__KAFKA__OPTIONS__BOOTSTRAP_SERVERS": "a:9092", "RELAY_DELIVERY__MAX_BATCH_EVENTS": "1"})
    load(file, {"RELAY_SINK__KIND": "console", "RELAY_DELIVERY__MAX_BATCH_EVENTS": "1"})


@pytest.mark.parametrize(
    "url", ["nats://u:a/hunter2@h:4222", "nats://u:hunter2", "b@hunter2@h:1", "nats://u:hunter2@x@h y"]
)
def test_a_url_that_cannot_be_read_is_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(None, {"RELAY_SINK__JETSTREAM__SERVERS": url})
    assert "hunter2" not in str(caught.value)


def test_a_dsn_file_that_cannot_be_read_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "dsn").write_text('host=h password=a"b hunter2')
    config = load(None, {"RELAY_DATABASE__DSN_FILE": str(tmp_path / "dsn")})
    with pytest.raises(ConfigError) as caught:
        config.database.conninfo()
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [{"PASSWORD": "x"}, {"USER": "u", "PASSWORD": "x", "PASSWORD_FILE": "f"}, {"TOKEN": "x", "TOKEN_FILE": "f"}],
)
def test_secrets_of_nats_that_contradict_each_other(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"^sink\.jetstream"):
        load(None, {f"RELAY_SINK__JETSTREAM__{name}": value for name, value in given.items()})
