"""A finished curation -> report.html: what each rule dropped, with samples, and what stayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from strop.curation.tally import RuleTally
from strop.curation.verdict import Verdict
from strop.reports.html import render
from strop.runs import write_text

_SHOWN_CHARS = 600
_ID_CHARS = 22


def write_page(path: Path, name: str, summary: Mapping[str, Any], rules: Sequence[RuleTally], kept: Sequence[Verdict]) -> None:
    """One file that needs no other. Raises `RunError` when it cannot be written."""
    values = {
        "name": name,
        "summary": summary,
        "rules": rules,
        "kept": kept,
        "shorten": _shorten,
        "shorten_id": _shorten_id,
    }
    write_text(path, render("curation.html.j2", values))


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} … ({len(text)} characters)"


def _shorten_id(name: str) -> str:
    """Both ends, and more of the second: there is what tells the rows of one file apart."""
    return name if len(name) <= _ID_CHARS else f"{name[: _ID_CHARS // 3]}…{name[1 - _ID_CHARS + _ID_CHARS // 3 :]}"
