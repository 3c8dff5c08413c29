"""Controls what glibc keeps of freed memory, and releases OpenMP threads. Does nothing on other systems.

libgomp, the OpenMP runtime of torch, keeps a team of helper threads for each thread that ever ran a parallel operation. While
there are more such threads than cores, each sleeps between two operations instead of spinning. A decode step consists of
hundreds of short operations and then takes twice as long: 208 instead of 110 ms for 64 rows of SmolLM2-135M on two cores. So
each thread releases its team after a compute phase; the next operation starts a new team, in about 0.1 ms.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
_is_kept = False


def give_back_freed_memory() -> None:
    """Return freed memory from glibc's heaps to the system, unless `keep_freed_memory` is set."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not _is_kept:
        trim(0)


def keep_freed_memory(is_kept: bool) -> None:
    """Set whether freed memory stays in the process, so that the next update of a trainer can use it again.

    Otherwise the system maps each page again after each publication: 5 to 8 s of an update of 38 s.
    """
    global _is_kept
    _is_kept = is_kept


def keep_little_freed_memory() -> None:
    """Let glibc return large freed blocks at once instead of keeping up to 32 MiB. For processes that only sample.

    A trainer in the same process would be slower, because each large tensor would need new pages.
    """
    _set(_M_MMAP_THRESHOLD, 4 << 20)
    _set(_M_TRIM_THRESHOLD, 16 << 20)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)


_SOFT = 1  # omp_pause_soft, OpenMP 5.0: threads start again when they are needed


def end_team() -> None:
    """Release the OpenMP threads of the calling thread, which must not be inside a parallel operation."""
    runtime = _libgomp()
    if runtime is not None and hasattr(runtime, "omp_pause_resource_all"):
        runtime.omp_pause_resource_all(_SOFT)


def use_threads(count: int) -> None:
    """Let the calling thread compute with so many, and leave all other threads as they are.

    `torch.set_num_threads` is also for threads that begin later, and for MKL in all of them.
    """
    runtime = _libgomp()
    if runtime is None:
        torch.set_num_threads(count)
    else:
        torch.get_num_threads()  # at its first call, torch sets its own number in this thread
        runtime.omp_set_num_threads(count)


@cache
def _libgomp() -> ctypes.CDLL | None:
    """Return the OpenMP runtime of torch, or None if it is another one."""
    maps = Path("/proc/self/maps")
    try:
        paths = {line.split()[-1] for line in maps.read_text(encoding="utf-8").splitlines() if "libgomp" in line}
    except OSError:
        return None
    return ctypes.CDLL(min(paths)) if paths else None
