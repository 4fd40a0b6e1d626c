"""JSON Schema per event type: `[routing.schemas]`. A payload that does not fit can never become an event.

Files are read and judged once, at start. Reasons name the place and what is wrong there, never the whole payload: it
goes to logs and to people who may not see it. Needs the extra `schema` (jsonschema); without schemas nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from relay.errors import ConfigError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

Check = Callable[[bytes], str]
"""payload → why it does not fit its schema, "" if it does."""

_LONGEST = 200


def load_schemas(schemas: Mapping[str, Path]) -> dict[bytes, Check]:
    """Event type → how to check its payload. Raises ConfigError with every fault."""
    faults: list[str] = []
    checks: dict[bytes, Check] = {}
    for event_type, path in schemas.items():
        try:
            checks[event_type.encode()] = _load(path)
        except ValueError as exc:
            faults.append(f"routing.schemas.{event_type}: {exc}")
    if faults:
        raise ConfigError(faults, hint="correct the files that [routing.schemas] names, or leave them out")
    return checks


@lru_cache
def _load(path: Path) -> Check:
    try:
        from jsonschema import SchemaError  # noqa: PLC0415  an extra: only who uses it needs it
        from jsonschema.validators import validator_for  # noqa: PLC0415
    except ImportError:
        raise ConfigError(
            ["routing.schemas needs the package jsonschema: pip install 'pg-outbox-relay[schema]'"]
        ) from None
    try:
        schema = orjson.loads(path.read_bytes())
    except OSError as exc:
        raise ValueError(f"{path} cannot be read: {exc.strerror}") from None
    except orjson.JSONDecodeError as exc:
        raise ValueError(f"{path} is not JSON: {exc}") from None
    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as exc:
        raise ValueError(f"{path} is not a JSON Schema: at {exc.json_path}: {exc.message[:_LONGEST]}") from None
    return _check(kind(schema))


def _check(validator: Validator) -> Check:
    def check(payload: bytes) -> str:
        try:
            instance = orjson.loads(payload)
        except orjson.JSONDecodeError as exc:
            return f"the payload is not JSON: {exc}"
        error = next(iter(validator.iter_errors(instance)), None)
        return "" if error is None else f"the payload does not fit its schema: {_said(error)}"

    return check


def _said(error: Any) -> str:
    """Where and what. Messages of jsonschema quote the value that is wrong; a large one is left out."""
    message = error.message
    if len(message) > _LONGEST:
        message = f"{error.validator}: {str(error.validator_value)[:_LONGEST]} is not fulfilled"
    return f"at {error.json_path}: {message}"
