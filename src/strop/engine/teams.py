"""Lets go of the helper threads that torch's products leave behind.

libgomp, torch's usual OpenMP runtime, keeps a team of threads for every thread that ever computed. While more threads are in
teams than there are cores, each of them goes to sleep between two operations instead of spinning, and a decode step, which is
hundreds of short operations, takes twice as long: 208 instead of 110 ms for 64 rows of SmolLM2-135M on two cores. So whoever
is done computing ends its team; the next operation makes a new one, in about 0.1 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path

_SOFT = 1  # omp_pause_soft, OpenMP 5.0: what is let go of comes back when it is needed


def end_team() -> None:
    """End the team of the calling thread, which must not be inside a parallel operation. Nothing where it cannot be done."""
    pause = _pause()
    if pause is not None:
        pause(_SOFT)


@cache
def _pause() -> Callable[[int], int] | None:
    """libgomp's function; None on other systems and with other runtimes, which do not throttle so."""
    maps = Path("/proc/self/maps")
    try:
        paths = {line.split()[-1] for line in maps.read_text(encoding="utf-8").splitlines() if "libgomp" in line}
    except OSError:
        return None
    for path in sorted(paths):
        function = getattr(ctypes.CDLL(path), "omp_pause_resource_all", None)
        if function is not None:
            typed: Callable[[int], int] = function
            return typed
    return None
