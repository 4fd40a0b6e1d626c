"""`relay demo`: a small shop, the relay and a consumer, on private servers, with a live view and an honest count.

It must never touch anything of the user's: own servers on free ports, own folders, none of the user's settings.
"""

from __future__ import annotations

from relay.demo.ledger import Summary
from relay.demo.summary import render
from relay.errors import OperatorError

__all__ = ["Summary", "demo", "render"]


def demo(
    *, rate: float = 200.0, seconds: float = 0.0, kafka: bool = False, chaos: bool = False, kill_every: float = 10.0
) -> Summary:
    """Play the demo until `seconds` are over (0: until SIGINT or SIGTERM), drain, and say what was counted."""
    try:
        from relay.demo.stage import Stage  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        if exc.name != "psutil":
            raise
        raise OperatorError(
            "the demo starts private servers, and they are not installed",
            hint="pip install 'pg-outbox-relay[embedded]'",
        ) from None
    return Stage(rate=rate, seconds=seconds, kafka=kafka, kill_every=kill_every if chaos else None).play()
