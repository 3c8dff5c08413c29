"""Selects problems for training by rules, with a reason for each dropped problem."""

from __future__ import annotations

from strop.curation.config import Comparison, Rule, Verdict, curate, load_curation, make_rule
from strop.curation.run import run_curation

__all__ = ["Comparison", "Rule", "Verdict", "curate", "load_curation", "make_rule", "run_curation"]
