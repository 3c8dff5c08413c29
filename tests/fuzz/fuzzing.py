"""Runs a property for a number of seconds, and holds what it calls to success or one clear error.

`make fuzz` sets FUZZ_SECONDS, which all targets share, and FUZZ_SEED, from which the examples follow: the same every time
unless another seed is given. Without seconds each target tries a few examples.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st

from strop.errors import UserError

_NUM_TARGETS = 5
SECONDS = float(os.environ.get("FUZZ_SECONDS", "0"))
_CPU_LIMIT_S = 5.0

INTEGERS = st.sampled_from([0, 1, -1, 2, 7, 601, 2**31, 2**63, -(2**64), 10**12, 10**40, -(10**40)])
FLOATS = st.sampled_from([0.0, -0.5, 0.5, 1.5, 1e-300, 1e308, -1e308, 1e12, 5e-324])
WORDS = st.sampled_from(
    ["", "grpo", "no such word", "rl", "sft", "base", "module:name", "../..", "a" * 300, "\x1b[31m", "ß", "\n", "0", "true"]
)
SCALARS = st.one_of(INTEGERS, FLOATS, WORDS, st.booleans())
JUNK = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(WORDS.filter(bool), inner, max_size=3)),
    max_leaves=5,
)


def fuzz(strategy: st.SearchStrategy[Any], check: Callable[[Any], None], *, examples: int = 30) -> None:
    """Call `check` with examples of `strategy` until this target's share of FUZZ_SECONDS is over."""
    until = time.monotonic() + SECONDS / _NUM_TARGETS
    first = int(os.environ.get("FUZZ_SEED", "0"))
    number = 0
    while number == 0 or time.monotonic() < until:

        @seed(first + number)
        @settings(
            max_examples=examples,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.explicit, Phase.generate, Phase.shrink],
            verbosity=Verbosity.quiet if not SECONDS else Verbosity.normal,
        )
        @given(strategy)
        def once(value: Any) -> None:
            check(value)

        once()
        number += 1


def survives(action: Callable[[], object], *, places: Collection[str]) -> None:
    """Call `action`. It may raise a `UserError` that names one of `places`; it takes at most a few seconds of CPU time."""
    with _cpu_limit():
        try:
            action()
        except UserError as error:
            message = str(error)
            assert any(place in message for place in places), f"names no place: {message}"
            assert len(message) < 20_000, f"a message of {len(message)} characters: {message[:500]}"


@contextlib.contextmanager
def _cpu_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {_CPU_LIMIT_S:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, _CPU_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
