"""Selects problems for training by rules, with a reason for each dropped problem."""

from __future__ import annotations

from strop.curation.config import Rule, curate, load_curation, make_rule
from strop.curation.run import run_curation
from strop.tasks.rows import Verdict

__all__ = ["Rule", "Verdict", "curate", "load_curation", "make_rule", "run_curation"]
