"""What sections are made of: their base, and the values that are written as text (durations, sizes, lists)."""

from __future__ import annotations

import re
from typing import Annotated, Any

import orjson

from relay.config.checked import BaseModel, BeforeValidator, ConfigDict, Field

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_NAME = re.compile(r"[a-z0-9_]{1,63}")


def plain(value: str) -> str:
    """A name that Postgres takes for a slot, and that needs no quotes anywhere."""
    if not _NAME.fullmatch(value):
        raise ValueError("a name has 1 to 63 of a-z, 0-9 and _")
    return value


def seconds(value: Any) -> Any:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d)?\s*", value)
        if not match:
            raise ValueError("not a duration (write for example 500ms, 1s, 5m, 2h)")
        return float(match[1]) * _UNITS[match[2] or "s"]
    return value


def size(value: Any) -> Any:
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+)\s*((?:[kmg]i?)?b)?\s*", value, re.IGNORECASE)
        if not match:
            raise ValueError("not a size (write for example 512KB, 16MB, 1GiB)")
        return int(match[1]) * _SIZES[(match[2] or "").upper()]
    return value


def listed(value: Any) -> Any:
    """Lists from the environment: JSON, or words with commas between."""
    if isinstance(value, str):
        if value.lstrip().startswith("["):
            return parsed(value)
        return [word.strip() for word in value.split(",") if word.strip()]
    return value


def parsed(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return orjson.loads(value)
        except orjson.JSONDecodeError as exc:
            raise ValueError(f"not JSON: {exc}") from None
    return value


Duration = Annotated[float, BeforeValidator(seconds), Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(seconds), Field(gt=0, allow_inf_nan=False)]
Size = Annotated[int, BeforeValidator(size), Field(gt=0)]
Words = Annotated[tuple[str, ...], BeforeValidator(listed)]


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)
