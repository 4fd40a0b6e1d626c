"""Where a configuration comes from: the file, and the environment, which nobody else reads."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relay.config.root import Config
from relay.errors import ConfigError
from relay.schema import load_schemas


def load(path: Path | None, environ: Mapping[str, str] | None = None) -> Config:
    """Read the file (if any), lay the environment over it, validate. Raises ConfigError with all faults."""
    from pydantic import ValidationError  # noqa: PLC0415  where nothing is checked it is not loaded

    faults: list[str] = []
    tree: dict[str, Any] = {}
    if path is not None:
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(
                [f"{path}: no such file"], hint="write one (see docs/configuration.md), or name it with --config"
            ) from None
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
            raise ConfigError([f"{path}: {exc}"]) from None
    faults += overlay(tree, os.environ if environ is None else environ)
    try:
        config = Config.model_validate(tree)
    except ValidationError as exc:
        for error in exc.errors(include_url=False, include_input=False):
            faults.append(_fault(error))
        raise ConfigError(faults, hint="docs/configuration.md lists every key") from None
    for routing in (config.routing, *(outbox.routing for outbox in config.outbox if outbox.routing)):
        try:
            load_schemas(routing.schemas)  # kept: the router asks for the same files
        except ConfigError as exc:
            raise ConfigError([*faults, *exc.faults], hint=exc.hint) from None
    if faults:
        raise ConfigError(faults, hint="docs/configuration.md lists every key")
    return config


def overlay(tree: dict[str, Any], environ: Mapping[str, str]) -> list[str]:
    """Lay RELAY_SECTION__KEY over the tree; returns the faults. A misspelt section is a fault, not a default."""
    faults: list[str] = []
    sections = set(Config.model_fields)
    for name in sorted(environ):
        if not name.startswith("RELAY_"):
            continue
        path = name.removeprefix("RELAY_").lower().split("__")
        if len(path) == 1:
            section, _, key = path[0].partition("_")
            if section in sections and key:
                faults.append(
                    f"{name}: write RELAY_{section.upper()}__{key.upper()} (two underscores after the section)"
                )
            elif section in sections:
                tree[section] = environ[name]  # whole section as JSON, for lists such as RELAY_OUTBOX
            continue
        if path[0] not in sections:
            faults.append(f"{name}: unknown section; known are {', '.join(sorted(sections))}")
            continue
        if path[:3] == ["sink", "kafka", "options"] and len(path) == 4:
            path[3] = path[3].replace("_", ".")
        node = tree
        for step in path[:-1]:
            child = node.setdefault(step, {})
            if not isinstance(child, dict):
                faults.append(f"{name}: {step} is a list; set the whole of it as JSON in RELAY_{path[0].upper()}")
                break
            node = child
        else:
            node[path[-1]] = environ[name]
    return faults


def _fault(error: Any) -> str:
    path = ".".join(str(step) for step in error["loc"])
    message = str(error["msg"]).removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            message = "unknown key"
        case "missing":
            message = "is required"
    return f"{path}: {message}" if path else message


def cache_folder() -> Path:
    """Where downloads (the embedded Kafka's jars) are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pg-outbox-relay"


def plain_environment() -> dict[str, str]:
    """The environment for a relay that a program starts with a file of its own: without the user's RELAY_* and PG*."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RELAY_", "PG"))}
