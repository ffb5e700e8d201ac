"""Waits for what happens in another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def wait_for(condition: Callable[[], object], timeout_s: float = 20.0) -> float:
    """Waits until the condition holds. Returns the seconds."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < timeout_s, f"not within {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - start
