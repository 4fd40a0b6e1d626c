"""relay: moves events out of PostgreSQL exactly as they were committed."""

from __future__ import annotations

__version__ = "0.1.0"
