"""What sections are made with: pydantic, which checks them; in a process that is handed a checked one, its shape alone.

pydantic and what it builds take 10 MB, for work that is over before the first event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relay import lean

if TYPE_CHECKING or not lean.checked_apart:
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, field_validator, model_validator
else:
    from relay.config.unchecked import (
        BaseModel,
        BeforeValidator,
        ConfigDict,
        Field,
        SecretStr,
        field_validator,
        model_validator,
    )

__all__ = ["BaseModel", "BeforeValidator", "ConfigDict", "Field", "SecretStr", "field_validator", "model_validator"]
