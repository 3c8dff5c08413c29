"""Checks a model and a recipe against each other, on the real parts, before time is spent on a run."""

from strop.doctor.cluster import examine_cluster
from strop.doctor.examine import CHECKS, examine_file, examine_parts
from strop.doctor.finding import Diagnosis, Finding, print_diagnosis
from strop.doctor.parts import Parts, open_parts

__all__ = [
    "CHECKS",
    "Diagnosis",
    "Finding",
    "Parts",
    "examine_cluster",
    "examine_file",
    "examine_parts",
    "open_parts",
    "print_diagnosis",
]
