"""Imports that are left out until they are needed: they would stand between the start and the first event."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

checked_apart = False
"""Whether this process' configuration is checked in another (`relay.apart`); set before `relay.config` is loaded."""


@contextmanager
def without(name: str) -> Iterator[None]:
    """Import what loads the module `name` where it finds one, and does without otherwise.

    Nothing happens if it is loaded already; afterwards it can be imported as ever.
    """
    loaded = name in sys.modules
    sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    try:
        yield
    finally:
        if not loaded:
            del sys.modules[name]
