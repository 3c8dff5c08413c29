"""Writes an analysis into its run: a page for people, a JSON file for programs."""

from __future__ import annotations

from pathlib import Path

from strop.analysis.document import as_json
from strop.analysis.page import analysis_page
from strop.analysis.read import Analysis
from strop.runs import RunDirectory, write_json, write_text


def write_analysis(run: RunDirectory, analysis: Analysis) -> tuple[Path, Path]:
    """Page and JSON, in `analysis/` of the run, named by the stage; each replaces what was there, whole or not at all.

    Raises:
        RunError: they cannot be written.
    """
    page, document = (run.path / "analysis" / f"{analysis.stage}.{ending}" for ending in ("html", "json"))
    write_text(page, analysis_page(analysis))
    write_json(document, as_json(analysis))
    return page, document
