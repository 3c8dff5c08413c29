"""What must hold after any program, whatever it did and however it ended. Each finding is one sentence; none is good."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import strop
from strop.sandbox import IsolationLevel, RunResult

from .case import Case, kind_of
from .host import Host

OWN_LIMIT_S = 0.5  # what a call may take beyond its own limit
NEXT_CALL_S = 1.0  # what a lone honest call may take
LOADED_MACHINE_S = 1.5  # added to both: the tests share their cores with whatever else runs
VICTIM_S = 8.0  # of a call of 0.1 s; more would mean that a hostile neighbour can starve it

OUTPUT_BYTES = 65_536
REPLY_CHARACTERS = OUTPUT_BYTES + 8_000 + 200  # the output, a traceback after it, and the marks of what was left out

_RUNNER_PATHS = tuple(dict.fromkeys((sys.prefix, sys.base_prefix, str(Path(strop.__file__).parent))))


def of_answer(case: Case, level: IsolationLevel, result: RunResult) -> list[str]:
    """The class is right and so is the text."""
    if any(answer.fits(result) for answer in case.answers_at(level)):
        return []
    wanted = " or ".join(f"{answer.kind} {answer.text!r}" for answer in case.answers_at(level))
    return [f"answered {kind_of(result)} {shorten(result.text)}, not {wanted}"]


def of_reply(result: RunResult, level: IsolationLevel, host: Host) -> list[str]:
    """Every reply can be sent, is bounded, blames only the program, and reveals no secret."""
    found = []
    if result.outcome.is_ours:
        found.append(f"a program caused {result.outcome}: {result.reason}")
    if result.level is not level:
        found.append(f"ran at level {result.level}")
    try:
        json.dumps(dataclasses.asdict(result), ensure_ascii=False).encode()
    except (TypeError, UnicodeEncodeError) as broken:
        found.append(f"the reply cannot be sent: {broken}")
    if len(result.text) > REPLY_CHARACTERS:
        found.append(f"the reply has {len(result.text)} characters")
    for name in host.canaries_in(f"{result.text} {result.reason}"):
        found.append(f"the reply holds the canary of {name}")
    for path in _RUNNER_PATHS:
        if path in result.text:
            at = result.text.index(path)
            found.append(f"the reply names a place of the runner: {result.text[max(0, at - 40) : at + 80]!r}")
    return found


def of_time(case: Case, elapsed_s: float) -> list[str]:
    allowed_s = case.wall_s + OWN_LIMIT_S + LOADED_MACHINE_S
    return [f"took {elapsed_s:.2f} s, its limit is {case.wall_s} s"] if elapsed_s > allowed_s else []


def of_next_call(result: RunResult, elapsed_s: float, text: str) -> list[str]:
    """The call after it finds a clean place."""
    if (result.outcome, result.text) != ("stdout", text):
        return [f"the next call answered {kind_of(result)} {shorten(result.text)}"]
    return [f"the next call took {elapsed_s:.2f} s"] if elapsed_s > NEXT_CALL_S + LOADED_MACHINE_S else []


def of_victim(result: RunResult, elapsed_s: float, text: str) -> list[str]:
    """The concurrent call is right, and not stuck."""
    if (result.outcome, result.text) != ("stdout", text):
        return [f"the concurrent call answered {kind_of(result)} {shorten(result.text)}"]
    return [f"the concurrent call took {elapsed_s:.2f} s"] if elapsed_s > VICTIM_S else []


def of_repetition(case: Case, level: IsolationLevel, first: RunResult, second: RunResult) -> list[str]:
    """The same call gives the same answer."""
    if kind_of(first) != kind_of(second):
        if not case.is_stable:
            return []
        return [f"answered {kind_of(first)} and then {kind_of(second)}"]
    if case.repeats_at(level) and first.text != second.text:
        return [f"the text differs from one run to the next: {shorten(first.text)} and {shorten(second.text)}"]
    return []


def shorten(text: str) -> str:
    return repr(text) if len(text) <= 600 else f"{text[:300]!r} ... {text[-300:]!r}"
