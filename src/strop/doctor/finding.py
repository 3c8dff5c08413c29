"""What the doctor reports: one finding a check, all of them together, and how a terminal shows them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from rich.console import Console
from rich.padding import Padding
from rich.table import Column, Table
from rich.text import Text

from strop.reports.number_format import counted
from strop.reports.rollouts import clipped
from strop.reports.terminal import printable


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


_STYLES = {
    Origin.PROMPT: "dim",
    Origin.FORCED: "dim yellow",
    Origin.OBSERVATION: "dim cyan",
    Origin.SAMPLED: "dim red",  # sampled, and yet not trained on
}
_TRAINED, _WRONGLY_TRAINED = "bold green", "bold white on red"
_LEFT_OUT = 700  # characters of a prompt from which on its middle is left out


def print_diagnosis(diagnosis: Diagnosis, console: Console | None = None) -> None:
    """Print every finding, and one rollout with the tokens that are trained on between ⟦ and ⟧."""
    console = Console(highlight=False) if console is None else console
    console.print()
    console.print(Text.assemble(("strop doctor", "bold"), f" · {diagnosis.subject}"))
    console.print()
    console.print(_table(diagnosis))
    console.print()
    if diagnosis.rollout:
        origins = ((f"  {origin}", style) for origin, style in _STYLES.items() if origin is not Origin.SAMPLED)
        console.print(Text.assemble("  One rollout as the loss sees it   ", ("⟦trained on⟧", _TRAINED), *origins))
        console.print(Padding(Text.assemble(*map(_marked, diagnosis.rollout)), (1, 2)))
    if num := len(diagnosis.problems):
        console.print(Text(f"{counted(num, 'problem')} found.", style="bold red"))
    else:
        console.print(Text("No problem found.", style="bold green"))


def _table(diagnosis: Diagnosis) -> Padding:
    table = Table.grid(Column(no_wrap=True), Column(no_wrap=True), Column(), padding=(0, 2))
    not_made = (Finding(check=name, detail="not checked", is_made=False) for name in diagnosis.not_made)
    for finding in (*diagnosis.findings, *not_made):
        if finding.is_problem:
            text = Text.assemble(printable(finding.detail), "\n", ("Remedy: ", "bold"), printable(finding.remedy))
            table.add_row(Text("✗", style="bold red"), Text(finding.check, style="bold red"), text)
        elif finding.is_made:
            table.add_row(Text("✓", style="green"), Text(finding.check), Text(printable(finding.detail)))
        else:
            table.add_row(*(Text(each, style="dim") for each in ("-", finding.check, finding.detail)))
    return Padding(table, (0, 2))


def _marked(piece: Piece) -> tuple[str, str]:
    """Return the text of a piece, and its style."""
    shown = printable(piece.text)
    if piece.origin is Origin.PROMPT:
        shown = clipped(shown, _LEFT_OUT)
    if not piece.is_trained:
        return shown, _STYLES[piece.origin]
    return f"⟦{shown}⟧", _TRAINED if piece.origin is Origin.SAMPLED else _WRONGLY_TRAINED
