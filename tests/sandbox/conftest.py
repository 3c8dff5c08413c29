"""One real sandbox for all tests of this folder, which need a machine that allows namespaces at all."""

from __future__ import annotations

import subprocess
from collections.abc import Awaitable, Callable, Iterator

import pytest

from strop.sandbox import Sandbox, SandboxConfig
from strop.sandbox.protocol import IsolationLevel, RunRequest, RunResult
from strop.sandbox.supervisor import node
from strop.sandbox.supervisor.self_test import Canaries, SelfTestReport, run_self_test


@pytest.fixture(scope="session", autouse=True)
def one_self_test() -> Iterator[None]:
    """Nodes of this process test each level once; the tests of the self-test call it themselves."""
    reports: dict[IsolationLevel, SelfTestReport] = {}

    async def test_once(
        run: Callable[[RunRequest], Awaitable[RunResult]], claimed: IsolationLevel, *, canaries: Canaries
    ) -> SelfTestReport:
        if claimed not in reports:
            report = await run_self_test(run, claimed, canaries=canaries)
            if report.broken(claimed):
                return report
            reports[claimed] = report
        return reports[claimed]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node, "run_self_test", test_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def box() -> Iterator[Sandbox]:
    # Asked of util-linux, not of our own code: a mistake there must fail the tests, not skip them.
    attempt = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "true"]
    done = subprocess.run(attempt, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"this machine allows no user namespaces: {done.stderr.strip()}")
    with Sandbox(config=SandboxConfig(max_running=4)) as box:
        yield box
