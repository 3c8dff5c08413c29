"""What a session computes between its cells, where it holds no slot and no clock runs."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from strop.sandbox.node.processes import num_running_threads, tree_cpu_s


class Idleness:
    """Of one session, as far as a look now and then can tell.

    A process that ends without being waited for takes the count of its CPU time with it. So every thread that runs at a look
    is taken to have run since the one before.
    """

    def __init__(self) -> None:
        self._seen_at = 0.0
        self._seen_cpu_s: float | None = None
        self.charged_s = 0.0  # of all its life

    def begin(self) -> None:
        self._seen_at = time.monotonic()
        self._seen_cpu_s = None

    def charge(self, pids: Sequence[int]) -> None:
        now, cpu_s = time.monotonic(), tree_cpu_s(pids)
        counted_s = 0.0 if self._seen_cpu_s is None else cpu_s - self._seen_cpu_s
        num_running = min(num_running_threads(pids), os.cpu_count() or 1)
        self.charged_s += max(counted_s, num_running * (now - self._seen_at), 0.0)
        self._seen_at, self._seen_cpu_s = now, cpu_s
