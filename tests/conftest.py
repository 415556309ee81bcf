"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# No test depends on the clock, which a busy machine stretches, or on chance.
settings.register_profile("visualtokens", deadline=None, derandomize=True)
settings.load_profile("visualtokens")
