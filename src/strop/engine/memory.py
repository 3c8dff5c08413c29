"""What glibc does with freed memory: given back to the system, or kept for what comes next. Nothing on other systems."""

from __future__ import annotations

import ctypes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # of glibc's malloc.h
_is_kept = False


def give_back_freed_memory() -> None:
    """Return to the system what glibc keeps of freed tensors: holes that nothing fits into, what another thread freed.

    Nothing where it is kept (`keep_freed_memory`).
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None and not _is_kept:
        trim(0)


def keep_freed_memory(is_kept: bool) -> None:
    """Whether the trainer of this process uses again, in its next update, what the last one freed.

    Given back at each publication, every page of it has to be fetched anew: 5 to 8 s of an update of 38 s. Threads that begin
    later share what heaps there are, or what one of them frees another would not use.
    """
    global _is_kept
    _is_kept = is_kept
    if is_kept:
        _set(_M_ARENA_MAX, 1)


def keep_little_freed_memory() -> None:
    """For a process that does nothing but infer: have glibc return large freed blocks at once, not keep up to 32 MiB of them.

    A trainer in the same process would pay for it: each of its large tensors would be new pages.
    """
    _set(_M_MMAP_THRESHOLD, 4 << 20)
    _set(_M_TRIM_THRESHOLD, 16 << 20)


def _set(option: int, value: int) -> None:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(option, value)
