"""A configuration that another process checked is the one that this process would have read, without the library."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.config import load, plain_environment
from relay.errors import ConfigError

DESCRIBE = """
def described(value):
    if isinstance(value, (tuple, list)):
        return [described(each) for each in value]
    if isinstance(value, dict):
        return {key: described(each) for key, each in value.items()}
    if hasattr(value, "get_secret_value"):
        return [type(value).__name__, value.get_secret_value(), str(value), repr(value)]
    if not hasattr(value, "model_fields_set"):
        return [type(value).__name__, str(value)]
    changed = value.model_copy(update={"name": 1})
    return [
        type(value).__name__, described(vars(value)), sorted(value.model_fields_set), value.model_dump_json(),
        value == value.model_copy(update={}), vars(changed)["name"], sorted(changed.model_fields_set),
    ]

def said(config):
    return [described(config), config.database.conninfo(), config.sink.kafka.librdkafka()]
"""
APART = """
import json, sys
from pathlib import Path
from relay import apart, frame
with frame.Explained():
    config = apart.load(Path(sys.argv[1]))
print(json.dumps([said(config), sorted({"pydantic", "pydantic_core", "rich"} & sys.modules.keys())]))
"""
CONFIGS = {
    "nothing": "",
    "secrets": """
        [database]
        dsn = "postgresql://me:s3cret@db/shop"
        [sink.jetstream]
        servers = ["tls://user:word@nats:4222"]
        user = "u"
        password = ""
        [sink.jetstream.tls]
        ca = "/etc/ca.pem"
        [[sink.jetstream.streams]]
        name = "EVENTS"
        subjects = "events.>, more.>"
        max_age = "7d"
        """,
    "kafka": """
        [database]
        dsn_file = "FOLDER/dsn"
        password_file = "FOLDER/password"
        [sink]
        kind = "kafka"
        [sink.kafka.options]
        "bootstrap.servers" = "k:9092"
        "sasl.password" = { file = "FOLDER/password" }
        "linger.ms" = 0.5
        """,
    "presets": """
        [[outbox]]
        preset = "event_outbox"
        write_back = { published = true, published_at = "now()" }
        [[outbox]]
        table = "a.ünicode"
        columns = { seq = "" }
        [outbox.routing]
        topic = "x.{event_type}"
        format = "payload"
        schemas = {}
        """,
}


def written(folder: Path, toml: str) -> Path:
    (folder / "dsn").write_text("host=db dbname=shop\n")
    (folder / "password").write_text("pässword\n")
    path = folder / "relay.toml"
    path.write_text(toml.replace("FOLDER", str(folder)), encoding="utf-8")
    return path


def apart(path: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    code = before + DESCRIBE + APART
    return subprocess.run(
        [sys.executable, "-c", code, path], env=plain_environment(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_configuration(name: str, tmp_path: Path) -> None:
    path = written(tmp_path, CONFIGS[name])
    known: dict[str, Any] = {}
    exec(DESCRIBE, known)
    ended = apart(path)
    assert ended.returncode == 0, ended.stderr
    expected = json.loads(json.dumps(known["said"](load(path, {}))))
    assert json.loads(ended.stdout) == [expected, []]


def test_the_same_faults(tmp_path: Path) -> None:
    path = written(tmp_path, '[database]\ndsn = 5\nspeed = 1\n[relay]\nname = "No Spaces"\n')
    with pytest.raises(ConfigError) as refused:
        load(path, {})
    ended = apart(path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr == "".join(f"error: {each}\n" for each in refused.value.faults) + f"hint: {refused.value.hint}\n"
    )


AT_ONCE = "import os, tomllib\ntomllib.loads = lambda _: os.kill(os.getpid(), 9)\n"
IN_ITS_ANSWER = """
import os, pickle
class Killed(pickle.Pickler):
    def __init__(self, file, protocol):
        file.write(bytes([128]))
        file.flush()
        os.kill(os.getpid(), 9)
pickle.Pickler = Killed
"""


@pytest.mark.parametrize("killed", [AT_ONCE, IN_ITS_ANSWER])
def test_a_check_that_could_not_end(killed: str, tmp_path: Path) -> None:
    """Such as for want of memory, before its answer or in it: one sentence, and no relay."""
    ended = apart(written(tmp_path, ""), killed)
    assert ended.returncode == 1
    assert ended.stderr == "error: the configuration could not be checked: the process that does it ended with -9\n"


def test_interrupted_meanwhile(tmp_path: Path) -> None:
    """Ctrl-C reaches both; the one that checks finds nobody left to tell, and says nothing."""
    before = """
import os, signal, time, tomllib
def loads(_):
    parent = os.getppid()
    os.kill(parent, signal.SIGINT)
    os.kill(os.getpid(), signal.SIGINT)
    while os.getppid() == parent:
        time.sleep(0.01)
    return {}
tomllib.loads = loads
signal.signal(signal.SIGINT, signal.default_int_handler)
"""
    ended = apart(written(tmp_path, ""), before)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "")


def test_nothing_is_made_and_nothing_changed_where_nothing_is_checked(tmp_path: Path) -> None:
    code = """
from relay.config import Delivery
try:
    Delivery(max_in_flight_events=0)
except TypeError as exc:
    print(exc)
try:
    config.delivery.backoff_max = 0
except AttributeError as exc:
    print(exc)
"""
    path = written(tmp_path, "")
    ended = subprocess.run(
        [sys.executable, "-c", DESCRIBE + APART + code, path],
        env=plain_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stdout.splitlines()[1:] == [
        "Delivery: nothing is checked in this process",
        "Delivery is frozen: backoff_max",
    ]
