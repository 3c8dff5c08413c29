"""One real sandbox for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from strop.sandbox import Sandbox, SandboxConfig


@pytest.fixture(scope="session")
def box() -> Iterator[Sandbox]:
    with Sandbox(config=SandboxConfig(max_running=4)) as box:
        yield box
