"""relay: moves events out of PostgreSQL exactly as they were committed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["Relay", "__version__"]

if TYPE_CHECKING:
    from relay.app import Relay


def __getattr__(name: str) -> Any:
    # `relay version` and the decoders need none of what the whole relay imports.
    if name == "Relay":
        from relay.app import Relay  # noqa: PLC0415

        return Relay
    raise AttributeError(name)
