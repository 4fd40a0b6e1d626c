"""Property tests have no time limit per example: machines differ, and nothing here is about speed."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", deadline=None, max_examples=60, print_blob=True)
settings.load_profile("unit")
