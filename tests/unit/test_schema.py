"""[routing.schemas]: faults are told at start, all at once; reasons name the place, not the payload."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from relay.config import load
from relay.errors import ConfigError
from relay.schema import load_schemas

SCHEMA = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "required": ["total"],
    "properties": {"total": {"type": "number"}, "lines": {"type": "array", "items": {"type": "string"}}},
    "additionalProperties": False,
}


def written(folder: Path, schema: Any, name: str = "order.json") -> Path:
    path = folder / name
    path.write_text(schema if isinstance(schema, str) else json.dumps(schema))
    return path


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ('{"total": 1.5}', ""),
        ('{"total": 123456789012345678901234567890}', ""),
        ("{}", "at $: 'total' is a required property"),
        ('{"total": 1, "lines": ["a", 2]}', "at $.lines[1]: 2 is not of type 'string'"),
        ("[1]", "at $: [1] is not of type 'object'"),
        ("no json", "not JSON"),
    ],
)
def test_payloads(tmp_path: Path, payload: str, reason: str) -> None:
    check = load_schemas({"order.created": written(tmp_path, SCHEMA)})[b"order.created"]
    told = check(payload.encode())
    assert reason in told and bool(told) == bool(reason)


def test_a_large_payload_is_not_in_the_reason(tmp_path: Path) -> None:
    check = load_schemas({"t": written(tmp_path, SCHEMA)})[b"t"]
    told = check(json.dumps({"total": "secret" * 1000}).encode())
    assert "secret" not in told and "$.total" in told and "number" in told


def test_all_faults_at_start(tmp_path: Path) -> None:
    files = {
        "missing": tmp_path / "missing.json",
        "broken": written(tmp_path, "{", "broken.json"),
        "wrong": written(tmp_path, {"type": "nothing"}, "wrong.json"),
        "fine": written(tmp_path, SCHEMA),
    }
    config = tmp_path / "relay.toml"
    config.write_text("[routing.schemas]\n" + "".join(f'"{name}" = "{path}"\n' for name, path in files.items()))
    with pytest.raises(ConfigError) as failure:
        load(config, {})
    missing, broken, wrong = failure.value.faults
    assert "routing.schemas.missing" in missing and "No such file" in missing
    assert "routing.schemas.broken" in broken and "is not JSON" in broken
    assert "routing.schemas.wrong" in wrong and "is not a JSON Schema: at $.type" in wrong


def test_together_with_what_else_is_wrong(tmp_path: Path) -> None:
    config = tmp_path / "relay.toml"
    config.write_text('[source]\nmode = "strem"\n[routing.schemas]\nmissing = "nowhere.json"\n')
    with pytest.raises(ConfigError) as failure:
        load(config, {})
    assert [fault.partition(":")[0] for fault in failure.value.faults] == ["source.mode", "routing.schemas.missing"]


def test_the_extra_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    with pytest.raises(ConfigError, match="needs the package jsonschema") as failure:
        load_schemas({"t": written(tmp_path, SCHEMA)})
    assert "[schema]" in failure.value.faults[0]


def test_without_schemas_nothing_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jsonschema", None)
    assert load_schemas({}) == {}
