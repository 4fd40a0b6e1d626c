"""What only a checkout has: tools that `relay bench` measures beside the relay."""

from __future__ import annotations
