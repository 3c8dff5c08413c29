"""Plays one case: twice, each time next to a victim and before an honest call, and looks from outside at what is left."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from strop.sandbox import RunOutcome, RunResult, RunTimings, Sandbox

from . import invariants
from .case import Case, kind_of
from .host import Host

_VICTIM = (
    "import time\ntotal = sum(n * n for n in range(50_000))\ntime.sleep(0.04)\nprint(total, sum(n for n in range(50_000)))"
)
_VICTIM_TEXT = "41665416675000 1249975000\n"
_VICTIM_WALL_S = 30.0  # it is judged by its elapsed time, not by its limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What came of one case."""

    name: str
    kind: str
    text: str
    elapsed_s: float
    violations: list[str]


def play(box: Sandbox, case: Case, host: Host) -> Report:
    """What the first run warms up, such as a fork server of another profile, is there before the second: no leak."""
    started_at = time.perf_counter()
    first, violations = _run(box, case, host)
    before = host.at_rest()
    second, more = _run(box, case, host)
    violations += [finding for finding in more if finding not in violations]
    violations += invariants.of_repetition(case, box.level, first, second)
    violations += host.after(before).leftovers_since(before)
    return Report(
        name=case.name,
        kind=kind_of(second),
        text=invariants.shorten(second.text),
        elapsed_s=time.perf_counter() - started_at,
        violations=violations,
    )


def _run(box: Sandbox, case: Case, host: Host) -> tuple[RunResult, list[str]]:
    honest_code, honest_stdin, honest_text = host.honest_call
    box.run(honest_code, stdin=honest_stdin)
    for code in case.before:
        box.run(host.fill(code), wall_s=case.wall_s)
    with ThreadPoolExecutor(2) as threads:
        victim = threads.submit(_timed, box, _VICTIM, wall_s=_VICTIM_WALL_S)
        accomplice: Future[tuple[RunResult, float]] | None = None
        if case.alongside:
            accomplice = threads.submit(_timed, box, host.fill(case.alongside), wall_s=case.wall_s)
        result, elapsed_s = _timed(box, host.fill(case.code), stdin=case.stdin, wall_s=case.wall_s, memory_mib=case.memory_mib)
        violations = invariants.of_victim(*victim.result(), _VICTIM_TEXT)
        if accomplice is not None and case.alongside_text is not None and accomplice.result()[0].text != case.alongside_text:
            violations.append(f"the accomplice printed {accomplice.result()[0].text!r}")
    after, after_s = _timed(box, honest_code, stdin=honest_stdin)
    violations += [
        *invariants.of_answer(case, box.level, result),
        *invariants.of_reply(result, box.level, host),
        *invariants.of_time(case, elapsed_s),
        *invariants.of_next_call(after, after_s, honest_text),
        *host.touches(),
    ]
    return result, violations


def _timed(
    box: Sandbox, code: str, *, stdin: str = "", wall_s: float | None = None, memory_mib: int | None = None
) -> tuple[RunResult, float]:
    """Time in the queue is not the call's own."""
    started_at = time.perf_counter()
    try:
        result = box.run(code, stdin=stdin, wall_s=wall_s, memory_mib=memory_mib)
    except Exception as error:  # noqa: BLE001 - whatever it is, a program made the service raise it
        assert box.level is not None
        result = RunResult(
            outcome=RunOutcome.INTERNAL,
            reason=repr(error)[-500:],
            text="",
            exit_code=None,
            timings=RunTimings(),
            level=box.level,
        )
    return result, time.perf_counter() - started_at - result.timings.queue_s
