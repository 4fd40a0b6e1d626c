"""The shape of pydantic without its checks: for a process that was handed a configuration that another had checked.

Only what our sections use, and what the relay asks of them. It must never make a section from values that nobody
checked: the only way in is `__setstate__`, with the state of a section that pydantic made (see `relay/apart.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar

import orjson

T = TypeVar("T")


class SecretStr:
    def __init__(self, value: str) -> None:
        self._value = value

    def get_secret_value(self) -> str:
        return self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SecretStr) and other._value == self._value

    def __hash__(self) -> int:
        return hash(self._value)

    def __repr__(self) -> str:
        return "SecretStr('**********')" if self._value else "SecretStr('')"

    def __str__(self) -> str:
        return "**********" if self._value else ""


class BaseModel:
    __slots__ = ("__dict__", "model_fields_set")

    model_fields_set: set[str]

    def __init__(self, **_values: Any) -> None:
        raise TypeError(f"{type(self).__name__}: nothing is checked in this process")

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        self.__dict__.update(state["__dict__"])
        object.__setattr__(self, "model_fields_set", state["__pydantic_fields_set__"])

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__} is frozen: {name}")

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    __hash__ = None  # type: ignore[assignment]

    def model_copy(self, *, update: Mapping[str, Any]) -> Self:
        copy = object.__new__(type(self))
        copy.__setstate__(
            {"__dict__": {**self.__dict__, **update}, "__pydantic_fields_set__": {*self.model_fields_set, *update}}
        )
        return copy

    def model_dump_json(self) -> str:
        return orjson.dumps(self, default=_plain).decode()


def _plain(value: object) -> object:
    match value:
        case BaseModel():
            return value.__dict__
        case Path() | SecretStr():
            return str(value)
    raise TypeError(type(value).__name__)


ConfigDict = dict


def Field(*_: object, **__: object) -> None:  # noqa: N802
    """A key: its default and its limits were applied already."""


def BeforeValidator(_: object) -> None:  # noqa: N802
    """A value that is written as text was read already."""


def field_validator(*_: object, **__: object) -> Callable[[T], T]:
    return lambda function: function


model_validator = field_validator
