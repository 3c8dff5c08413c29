"""What an update takes: seconds, and the most memory that the process ever held above what it held with all imported."""

from __future__ import annotations

import time
from pathlib import Path


class Memory:
    """Make it when everything is imported and nothing is loaded."""

    def __init__(self) -> None:
        self._idle = _status("VmRSS")
        self._started_at = 0.0

    def begin(self) -> None:
        self._started_at = time.perf_counter()

    def end(self) -> dict[str, float]:
        return {
            "update_s": time.perf_counter() - self._started_at,
            "peak_above_idle_mib": (_status("VmHWM") - self._idle) / 1024,
        }


def _status(name: str) -> int:
    """In KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
