"""The options of Debezium's files: read from JSON or properties, and sorted by whom they are for. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from relay.errors import ConfigError

ROUTER = "io.debezium.transforms.outbox.EventRouter"


@dataclass(slots=True)
class Found:
    """The options of the files, sorted by whom they are for; what is used is taken out."""

    name: str = ""
    connector: dict[str, str] = field(default_factory=dict)
    router: dict[str, str] = field(default_factory=dict)
    sink: str = ""
    options: dict[str, str] = field(default_factory=dict)  # of the sink
    other: dict[str, str] = field(default_factory=dict)
    server: bool = False


def read(name: str, text: str) -> dict[str, str]:
    """The options of one file, JSON or properties."""
    if text.lstrip().startswith("{"):
        try:
            parsed = orjson.loads(text)
        except orjson.JSONDecodeError as exc:
            raise ConfigError([f"{name} is not JSON: {exc}"]) from None
        inner = parsed.get("config", parsed)
        if not isinstance(inner, dict):
            raise ConfigError([f"{name}: config is not an object"])
        if "name" in parsed:
            inner = {"name": parsed["name"], **inner}
        return {key: value if isinstance(value, str) else json.dumps(value) for key, value in inner.items()}
    return properties(text)


def properties(text: str) -> dict[str, str]:
    """Java's properties: # and ! comments, = or : or blank between, lines continued by a backslash."""
    found: dict[str, str] = {}
    for line in re.sub(r"\\\r?\n[ \t]*", "", text).splitlines():
        stripped = line.strip()
        if not stripped or stripped[0] in "#!":
            continue
        match = re.match(r"((?:\\.|[^\\=:\s])+)\s*[=:\s]?\s*(.*)", stripped)
        assert match is not None
        found[_unescape(match[1])] = _unescape(match[2])
    return found


def _unescape(text: str) -> str:
    known = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}

    def one(match: re.Match[str]) -> str:
        return chr(int(match[1][1:], 16)) if len(match[1]) == 5 else known.get(match[1], match[1])

    return re.sub(r"\\(u[0-9a-fA-F]{4}|.)", one, text)


def sort(options: Mapping[str, str]) -> Found:
    """Who each option is for; refuses what has no outbox event router."""
    found = Found(server=any(key.startswith("debezium.") for key in options))
    plain: dict[str, str] = {}
    for key, value in options.items():
        if key.startswith("debezium.source."):
            plain[key.removeprefix("debezium.source.")] = value
        elif key.startswith(("debezium.transforms", "debezium.predicates")):
            plain[key.removeprefix("debezium.")] = value
        elif key == "debezium.sink.type":
            found.sink = value
        elif key.startswith("debezium.sink."):
            found.options[key.removeprefix("debezium.sink.")] = value
        elif key.startswith("debezium.") or (found.server and key.startswith("quarkus.")):
            found.other[key] = value
        else:
            plain[key] = value
    aliases = [alias.strip() for alias in plain.pop("transforms", "").split(",") if alias.strip()]
    router = next((alias for alias in aliases if plain.get(f"transforms.{alias}.type") == ROUTER), None)
    if router is None:
        raise ConfigError(
            ["there is no outbox event router in it"],
            hint=f"the relay replaces Debezium's outbox router: a transform of the type {ROUTER}",
        )
    for key, value in plain.items():
        if key.startswith(f"transforms.{router}."):
            found.router[key.removeprefix(f"transforms.{router}.")] = value
        elif key.startswith(("transforms.", "predicates", "key.converter", "value.converter", "header.converter")):
            found.other[key] = value
        elif key.startswith("producer.override."):
            found.options[f"kafka.producer.{key.removeprefix('producer.override.')}"] = value
        else:
            found.connector[key] = value
    del found.router["type"]
    if not found.server:
        found.sink = "kafka"
    found.name = found.connector.get("name", "")
    return found
