"""The front needs no sandbox: in this folder the nodes are scripted, so the real one of the folder above is not started."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def box() -> None:
    """Takes the place of the fixture of the same name above."""
