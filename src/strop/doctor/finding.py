"""What the doctor reports: one finding a check, and all of them together."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check measured. With a remedy it is a problem; without one all is well, or there was nothing to measure."""

    check: str
    detail: str
    remedy: str
    is_made: bool = True

    @classmethod
    def fine(cls, check: str, detail: str) -> Self:
        return cls(check=check, detail=detail, remedy="")

    @classmethod
    def not_made(cls, check: str, why: str) -> Self:
        """Nothing in recipe and model that the check is about."""
        return cls(check=check, detail=f"not made: {why}", remedy="", is_made=False)

    @classmethod
    def from_message(cls, check: str, message: str) -> Self:
        """A problem told in an error's words, whose last sentence is the remedy."""
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
    not_made: tuple[str, ...]
    rollout: tuple[Piece, ...]  # empty when none could be played

    @property
    def problems(self) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.is_problem)
