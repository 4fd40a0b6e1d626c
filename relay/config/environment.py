"""Where a configuration comes from: the file, and the environment, which nobody else reads."""

from __future__ import annotations

import copy
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relay.config.root import Config
from relay.config.section import parsed
from relay.errors import ConfigError
from relay.schema import load_schemas

_OPTIONS = ("sink", "kafka", "options")
_HINT = "docs/configuration.md lists every key"
_PLAIN = {
    "extra_forbidden": "unknown key",
    "missing": "is required",
    "int_type": "must be a whole number",
    "int_parsing": "must be a whole number",
    "int_from_float": "must be a whole number",
    "float_type": "must be a number",
    "float_parsing": "must be a number",
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "string_type": "must be a text",
    "path_type": "must be a path",
    "dict_type": "must be a table of keys and values",
    "model_type": "must be a table of keys and values",
    "tuple_type": "must be a list",
    "literal_error": "must be {expected}",
    "greater_than": "must be more than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}
"""In our own words what pydantic says in its own, by its types of errors."""


def load(path: Path | None, environ: Mapping[str, str] | None = None) -> Config:
    """Read the file (if any), lay the environment over it, validate. Raises ConfigError with all faults."""
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
    config = _validated(tree, faults)
    faults += _schema_faults(config)
    if faults:
        raise ConfigError(faults, hint=_HINT)
    return config


def _schema_faults(config: Config) -> list[str]:
    """What is wrong with the files of [routing.schemas]. The good ones are kept: the router asks for them again."""
    faults: dict[str, None] = {}
    for routing in (config.routing, *(outbox.routing for outbox in config.outbox if outbox.routing)):
        try:
            load_schemas(routing.schemas)
        except ConfigError as exc:
            faults |= dict.fromkeys(exc.faults)
    return list(faults)


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
                try:
                    tree[section] = parsed(environ[name])  # as a whole, for lists such as RELAY_OUTBOX
                except ValueError as exc:
                    faults.append(f"{name}: {exc}")
            continue
        if path[0] not in sections:
            faults.append(f"{name}: unknown section; known are {', '.join(sorted(sections))}")
            continue
        if tuple(path[:3]) == _OPTIONS and len(path) == 4:
            path[3] = path[3].replace("_", ".")
        node = tree
        for step in path[:-1]:
            child = node.setdefault(step, {})
            if not isinstance(child, dict):
                faults.append(
                    f"{name}: {step} is a list; set the whole of it as JSON in RELAY_{path[0].upper()}"
                    if isinstance(child, list)
                    else f"{name}: {step} has no keys below it"
                )
                break
            node = child
        else:
            node[path[-1]] = environ[name]
    return faults


def _validated(tree: dict[str, Any], faults: list[str]) -> Config:
    """Rules over several keys are asked only where each key is right by itself: a second look leaves out the rest."""
    from pydantic import ValidationError  # noqa: PLC0415  where nothing is checked it is not loaded

    try:
        return Config.model_validate(tree)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_input=False)
    found = dict.fromkeys(_fault(error) for error in errors)
    rest = copy.deepcopy(tree)
    left_out = [_leave_out(rest, error["loc"]) for error in errors]
    try:
        found |= dict.fromkeys(_schema_faults(Config.model_validate(rest)))
    except ValidationError as exc:
        for error in exc.errors(include_url=False, include_input=False):
            if not any(error["loc"] in (path, path[:-1]) for path in left_out):  # else perhaps because of that
                found[_fault(error)] = None
    raise ConfigError([*faults, *found], hint=_HINT) from None


def _leave_out(tree: dict[str, Any], loc: Sequence[int | str]) -> tuple[int | str, ...]:
    """Remove the innermost key on the way to a fault; returns its path."""
    node: Any = tree
    path: tuple[int | str, ...] = ()
    holder: tuple[dict[Any, Any], tuple[int | str, ...]] | None = None
    for step in loc:
        inside = step in node if isinstance(node, dict) else isinstance(node, list) and step in range(len(node))
        if not inside:
            break
        path = (*path, step)
        if isinstance(node, dict):
            holder = node, path
        node = node[step]
    if holder is None:
        return ()
    node, path = holder
    del node[path[-1]]
    return path


def _fault(error: Any) -> str:
    loc = tuple(error["loc"])
    if loc[:3] == _OPTIONS and len(loc) > 4:  # once for each type that it could be
        return f'{".".join(loc[:4])}: must be a text, a number, true, false or {{ file = "…" }}'
    path = ".".join(str(step) for step in loc)
    if plain := _PLAIN.get(error["type"]):
        message = plain.format(**error.get("ctx", {}))
    else:
        message = str(error["msg"]).removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


def cache_folder() -> Path:
    """Where downloads (the embedded Kafka's jars) are kept between runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pg-outbox-relay"


def plain_environment() -> dict[str, str]:
    """The environment for a relay that a program starts with a file of its own: without the user's RELAY_* and PG*."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("RELAY_", "PG"))}
