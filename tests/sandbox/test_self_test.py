"""The self-test against runners of every strength: it must find out what each gives, and leave nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from rich.console import Console

from strop.sandbox.config import SandboxConfig
from strop.sandbox.protocol import IsolationLevel, RunOutcome, RunRequest, RunResult, RunTimings
from strop.sandbox.supervisor.attacks import CHECKS, CheckResult
from strop.sandbox.supervisor.node import Node
from strop.sandbox.supervisor.self_test import Canaries, SelfTestReport, level_of, refusal, run_self_test

CONTAINER = Path(__file__).with_name("container.py")
PROCESS, CONFINED = IsolationLevel.PROCESS, IsolationLevel.CONFINED
NAMESPACES, STRICT = IsolationLevel.NAMESPACES, IsolationLevel.STRICT

Run = Callable[[RunRequest], Awaitable[RunResult]]


async def unconfined(request: RunRequest) -> RunResult:
    """A runner that keeps nothing away from a program."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", request.code, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    printed, said = await process.communicate(request.stdin.encode())
    return RunResult(
        outcome=RunOutcome.STDOUT if process.returncode == 0 else RunOutcome.ERROR,
        reason="",
        text=(printed + said).decode(),
        exit_code=process.returncode,
        timings=RunTimings(),
        level=PROCESS,
    )


async def broken(request: RunRequest) -> RunResult:
    result = await unconfined(RunRequest(code="raise SystemExit('no luck today')"))
    assert result.outcome is RunOutcome.ERROR
    return result


def probe_with(run: Run, claimed: IsolationLevel) -> SelfTestReport:
    with Canaries() as canaries:
        return asyncio.run(run_self_test(run, claimed, canaries=canaries))


def probe_node(level: IsolationLevel, **settings: int) -> SelfTestReport:
    async def start_and_probe() -> SelfTestReport:
        with Canaries() as canaries:
            async with Node(SandboxConfig(level=level, min_level=level, **settings)) as node:
                return await run_self_test(node.run, level, canaries=canaries)

    return asyncio.run(start_and_probe())


def names(probes: tuple[CheckResult, ...]) -> set[str]:
    return {one.name for one in probes}


@pytest.fixture(scope="module")
def attacked(tmp_path_factory) -> Path:
    """The directory in which unconfined attacks run, with somebody's file and directory in it."""
    directory: Path = tmp_path_factory.mktemp("attacked")
    (directory / "notes.txt").write_text("not yours")
    (directory / "papers").mkdir()
    return directory


@pytest.fixture(scope="module")
def open_report(attacked) -> SelfTestReport:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(attacked)
        return probe_with(unconfined, STRICT)


@pytest.mark.parametrize("level", [STRICT, NAMESPACES, CONFINED, PROCESS])
def test_a_node_keeps_every_promise_of_its_level(level):
    report = probe_node(level)
    assert names(report.broken(level)) == set()
    assert level_of(report) is level


def test_a_node_that_runs_one_program_at_a_time_is_not_called_weak():
    report = probe_node(NAMESPACES, max_running=1, max_alive=1)
    assert level_of(report) is NAMESPACES
    neighbours = next(one for one in report.probes if one.name == "neighbours")
    assert neighbours.detail == "not found; the two did not run at the same time"


def test_no_promise_is_kept_where_nothing_is_kept_away(open_report):
    assert {one.name for one in open_report.probes if one.held} == set()
    assert level_of(open_report) is None
    assert "our canary" in next(one for one in open_report.probes if one.name == "environment").detail
    reached = next(one for one in open_report.probes if one.name == "network").detail
    assert reached == "reached our listener: abstract, datagram, tcp, udp, unix"


def test_an_attack_that_nothing_stops_removes_nothing_but_its_own(open_report, attacked):
    left = {path.name for path in attacked.iterdir()}
    assert left >= {"notes.txt", "papers"}
    assert all((attacked / name).stat().st_size == 0 for name in left - {"notes.txt", "papers"})  # by which two find each other
    assert (attacked / "notes.txt").read_text() == "not yours"


def test_limits_alone_are_the_lowest_level():
    report = probe_node(PROCESS)
    assert names(report.broken(PROCESS)) == set()
    assert {"read", "write", "signals", "network", "daemon", "neighbours"} <= names(report.broken(CONFINED))


def test_a_program_that_says_nothing_proves_nothing():
    report = probe_with(broken, NAMESPACES)
    assert {one.name for one in report.probes if one.held} == set()
    assert "no luck today" in report.probes[0].detail


def test_one_broken_promise_lowers_the_level_to_what_does_not_need_it():
    def report(**broken_names: bool) -> SelfTestReport:
        probes = tuple(
            CheckResult(name=check.name, shows=check.shows, level=check.level, held=check.name not in broken_names, detail="")
            for check in CHECKS
        )
        return SelfTestReport(claimed=NAMESPACES, probes=probes, seconds=0.0)

    assert level_of(report()) is NAMESPACES  # never more than was claimed
    assert level_of(report(disk=True)) is CONFINED
    assert level_of(report(daemon=True)) is PROCESS
    assert level_of(report(daemon=True, disk=True)) is PROCESS
    assert level_of(report(memory=True)) is None


def test_nothing_of_a_self_test_stays_even_where_every_attack_succeeds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def traces() -> tuple[set[str], set[str], str | None]:
        directories = {name for place in ("/tmp", "/var/tmp") for name in os.listdir(place) if name.startswith("strop-canary-")}
        lines = subprocess.run(["ps", "-eo", "stat,comm"], capture_output=True, text=True, check=True).stdout.splitlines()
        processes = {line for line in lines if not line.startswith("Z") and "strop" in line}
        return directories, processes, os.environ.get("STROP_CANARY")

    before = traces()
    report = probe_with(unconfined, PROCESS)
    assert not next(one for one in report.probes if one.name == "daemon").held  # there was something to clean up
    assert traces() == before


def test_the_report_is_printed_and_written(open_report):
    screen = io.StringIO()
    Console(file=screen, width=200).print(open_report.table())
    assert "Self-test at L3 strict: nothing holds" in screen.getvalue()
    written = json.loads(json.dumps(open_report.as_json()))
    assert written["claimed"] == "strict"
    assert written["level"] is None
    assert {one["name"] for one in written["probes"]} == {check.name for check in CHECKS}
    for check in CHECKS:
        assert check.name in screen.getvalue()


def test_a_refusal_names_what_did_not_hold_and_the_remedy(open_report):
    text = str(refusal(CONFINED, {NAMESPACES: "unshare a user namespace: Operation not permitted", CONFINED: open_report}))
    assert "sandbox.min_level is 'confined' (L1)" in text
    assert "L2 namespaces does not start: unshare a user namespace: Operation not permitted" in text
    assert "read (got through: read)" in text
    assert "network (reached our listener: abstract" in text
    assert "disk" not in text  # not among the promises of L1
    assert "allows the landlock_* system calls" in text
    assert "user namespaces" in text
    assert "sandbox.min_level = 'process'" in text


CONTAINED = """
import asyncio, json
from strop.errors import UserError
from strop.sandbox.config import SandboxConfig
from strop.sandbox.supervisor.node import Node
from strop.sandbox.supervisor.self_test import Canaries, level_of, run_self_test
from strop.sandbox.protocol import IsolationLevel

async def main():
    found = {}
    for level in (IsolationLevel.NAMESPACES, IsolationLevel.CONFINED):
        try:
            with Canaries() as canaries:
                async with Node(SandboxConfig(level=level, min_level=level)) as node:
                    report = await run_self_test(node.run, level, canaries=canaries)
                    found[level.value] = [level_of(report), [one.name for one in report.broken(level)]]
        except UserError as error:
            found[level.value] = ["refused", str(error)]
    print(json.dumps(found))

asyncio.run(main())
"""


def contained(*options: str) -> dict[str, list[str]]:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src"), "HOME": "/nonexistent"}
    command = [sys.executable, str(CONTAINER), *options, sys.executable, "-c", CONTAINED]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("options", [(), ("--unprivileged",)], ids=["root", "unprivileged"])
def test_a_plain_container_gives_the_level_without_namespaces(options):
    found = contained(*options)
    assert found["namespaces"][0] == "refused"
    assert found["confined"] == ["confined", []]


def test_an_unprivileged_user_with_namespaces_gets_the_level_with_them():
    found = contained("--allow-namespaces", "--unprivileged")
    assert found == {"namespaces": ["namespaces", []], "confined": ["confined", []]}


def test_a_container_that_denies_landlock_gives_neither():
    found = contained("--deny-landlock")
    assert found["namespaces"][0] == "refused"
    assert found["confined"][0] == "refused"
    assert "Landlock" in found["confined"][1]
