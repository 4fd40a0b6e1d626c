"""HTTP for operators and machines: health, readiness, metrics, status. Reads what the relay knows; decides nothing."""

from __future__ import annotations

from relay.admin.server import AdminServer
from relay.admin.status import progress_line, status

__all__ = ["AdminServer", "progress_line", "status"]
