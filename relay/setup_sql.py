"""The files of sql/, and how names get into SQL."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

from psycopg import sql

from relay.source.slot import split


def load(name: str, variables: Mapping[str, str] | None = None, raw: Mapping[str, str] | None = None) -> str:
    """A file of sql/ with its psql variables: `:"name"` an identifier, `:'name'` a literal, `:name` raw."""
    shipped = files("relay").joinpath("sql", name)
    folder = Path(__file__).parent.parent / "sql"  # an editable install has them beside the package
    text = shipped.read_text("utf-8") if shipped.is_file() else (folder / name).read_text("utf-8")
    preamble, marker, body = text.partition("-- end of psql variables\n")
    return fill(body.lstrip("\n") if marker else preamble, variables or {}, raw or {})


def fill(text: str, variables: Mapping[str, str], raw: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        quote, name = match[1], match[2]
        if quote == '"':
            return identifier(variables[name])
        if quote == "'":
            return sql.Literal(variables[name]).as_string(None)
        return raw.get(name, match[0])

    return re.sub(r"(?<!:):([\"']?)([a-z][a-z0-9_]*)\1", value, text)


def identifier(name: str) -> str:
    return sql.Identifier(name).as_string(None)


def qualified(table: str) -> str:
    return sql.Identifier(*split(table)).as_string(None)
