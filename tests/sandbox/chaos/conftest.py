"""Every test of this folder starts a service of its own."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def box() -> None:
    """Takes the place of the fixture of the same name above."""
