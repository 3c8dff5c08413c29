"""One real sandbox for all tests of this folder, which need a machine that allows namespaces at all."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from strop.sandbox import Sandbox, SandboxConfig


@pytest.fixture(scope="session", autouse=True)
def box() -> Iterator[Sandbox]:
    # Asked of util-linux, not of our own code: a mistake there must fail the tests, not skip them.
    attempt = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]
    done = subprocess.run(attempt, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this machine allows no user namespaces: {done.stderr.strip()}")
    with Sandbox(config=SandboxConfig(max_running=4)) as box:
        yield box
