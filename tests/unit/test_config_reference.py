"""The page of settings is what the models say, and its example works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from relay.config import Config, load, overlay
from relay.config_reference import EXAMPLE, PAGE, _model, render


def keys(model: type[BaseModel], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, field in model.model_fields.items():
        inner = _model(field.annotation)[0]
        found |= keys(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}"}
    return found


def documented() -> set[str]:
    found, section = set(), ""
    for line in render().splitlines():
        if heading := re.fullmatch(r"## `\[+([a-z_.]+)\]+`", line):
            section = heading[1]
        elif row := re.match(r"\| `([a-z_]+)`", line):
            found.add(f"{section}.{row[1]}")
    return found


def test_the_page_is_not_stale() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "run: python -m relay.config_reference"


def test_every_key_is_on_the_page_with_a_meaning() -> None:
    assert documented() == keys(Config)
    for line in render().splitlines():
        if line.startswith("| `"):
            assert line.count("|") == 5, line
            assert not line.endswith("| None |"), line


def test_every_variable_on_the_page_reaches_its_key() -> None:
    for name in re.findall(r"<br>`(RELAY_\w+)`", render()):
        tree: dict[str, Any] = {}
        assert overlay(tree, {name: "value"}) == []
        path = name.removeprefix("RELAY_").lower().split("__")
        node: Any = tree
        for step in path:
            node = node[step]
        assert node == "value"
        assert ".".join(path) in keys(Config)


def test_the_example_is_valid_and_has_only_keys_that_exist(tmp_path: Path) -> None:
    file = tmp_path / "relay.toml"
    file.write_text(EXAMPLE, encoding="utf-8")
    config = load(file, {})
    assert config.sink.jetstream.streams[0].create is True
    assert f"```toml\n{EXAMPLE}```" in render()
