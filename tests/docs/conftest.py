"""Puts docs/ on the path, so that tests import the generator of pages."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docs"))
