"""What a hostile case is: a program, what it attacks, and every answer that is right."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from re import Pattern

from strop.sandbox import IsolationLevel, RunResult

STRICT, NAMESPACES, CONFINED, PROCESS = IsolationLevel


@dataclass(frozen=True, slots=True)
class Answer:
    """One right answer: the class as `RunOutcome` has it, with the reason after a colon for what was killed."""

    kind: str
    text: str | Pattern[str] | None = None  # all of it, a part of it, or whatever it is

    def fits(self, result: RunResult) -> bool:
        if kind_of(result) != self.kind:
            return False
        if isinstance(self.text, Pattern):
            return self.text.search(result.text) is not None
        return self.text is None or self.text == result.text


Answers = tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """A program that somebody might run at us.

    In programs, `HOST_...` stands for a fact of the host: see `Host.facts`.
    """

    name: str
    attacks: str
    code: str
    _: KW_ONLY
    expect: Answers
    at: Mapping[IsolationLevel, Answers] = field(default_factory=dict)  # where a level answers otherwise
    needs: str = ""  # the part of the confinement it leans on
    holds_from: IsolationLevel = CONFINED  # the least level that withstands it
    stdin: str = ""
    wall_s: float = 10.0  # far more than an honest program needs: the machine may be busy
    memory_mib: int = 512
    before: tuple[str, ...] = ()  # calls that prepare the attack
    alongside: str = ""  # an accomplice that runs at the same time
    alongside_text: str | None = None  # what the accomplice must print; None: whatever it likes
    repeats_from: IsolationLevel | None = CONFINED  # the least level where the text is the same each time; None: a race
    is_stable: bool = True  # the same class each time; only a race may lack it
    is_short: bool = False  # belongs to the selection that every test run plays
    is_core: bool = False  # played in every context, not only in that of the tests

    def answers_at(self, level: IsolationLevel) -> Answers:
        return self.at.get(level, self.expect)

    def repeats_at(self, level: IsolationLevel) -> bool:
        return self.repeats_from is not None and level.rank >= self.repeats_from.rank

    def holds_at(self, level: IsolationLevel) -> bool:
        return level.rank >= self.holds_from.rank


def kind_of(result: RunResult) -> str:
    return f"{result.outcome}:{result.reason}" if result.outcome == "killed" else result.outcome.value


def program(text: str) -> str:
    return textwrap.dedent(text).removeprefix("\n")


def either(*answers: Answers) -> Answers:
    """Each is right, but a level must always give the same one."""
    return tuple(answer for alternatives in answers for answer in alternatives)


def stdout(text: str | Pattern[str] | None = None) -> Answers:
    return (Answer("stdout", text),)


def echo(text: str | Pattern[str]) -> Answers:
    return (Answer("echo", text),)


def empty() -> Answers:
    return (Answer("empty", ""),)


def error(last_line: str | Pattern[str]) -> Answers:
    """A string is the whole last line of the traceback, or of what stands in its place."""
    pattern = last_line if isinstance(last_line, Pattern) else re.compile(rf"(^|\n){re.escape(last_line)}\n\Z")
    return (Answer("error", pattern),)


def exited(code: int) -> Answers:
    return error(f"The program exited with code {code}.")


def timeout(text: str | Pattern[str] | None = None) -> Answers:
    return (Answer("timeout", text),)


def killed(reason: str, text: str | Pattern[str] | None = None) -> Answers:
    return (Answer(f"killed:{reason}", text),)


def rejected() -> Answers:
    return (Answer("rejected"),)


# Named semaphores are files in /dev/shm. Calls without their own mounts would share it, so no program may write there.
NO_SEMAPHORES = {CONFINED: error(re.compile(r"\nPermissionError: \[Errno 13\]"))}
