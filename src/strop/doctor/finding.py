"""What the doctor reports: one finding a check, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


class Problem(Exception):  # noqa: N818 - named for what was found
    """A check found a problem; with its remedy."""

    def __init__(self, detail: str, remedy: str) -> None:
        super().__init__(detail)
        self.detail, self.remedy = detail, remedy


class NotMade(Exception):  # noqa: N818
    """Recipe and model hold nothing that the check is about; with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check measured. With a remedy it is a problem; without one all is well, or there was nothing to measure."""

    check: str
    detail: str
    remedy: str = ""
    is_made: bool = True

    @classmethod
    def from_message(cls, check: str, message: str) -> Self:
        """Return the problem of an error, whose last sentence is the remedy."""
        problem, _, remedy = message.strip().rpartition(". ")
        if not problem:
            return cls(check=check, detail=message, remedy="Mend what the message names, then call the doctor again.")
        return cls(check=check, detail=f"{problem}.", remedy=remedy)

    @property
    def is_problem(self) -> bool:
        return bool(self.remedy)


class Origin(StrEnum):
    """Where a token of a rollout comes from."""

    PROMPT = "prompt"
    FORCED = "forced"  # put into the policy's mouth
    SAMPLED = "sampled"
    OBSERVATION = "observation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring tokens of one origin, all trained on or all not."""

    text: str
    origin: Origin
    is_trained: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Every finding, the checks that could not be made, and one rollout as the loss sees it."""

    subject: str  # recipe and model, in words
    findings: tuple[Finding, ...]
    not_made: tuple[str, ...] = ()
    rollout: tuple[Piece, ...] = ()  # empty when none could be played

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_problem)
