"""Programs that serve as engines: how they start, what is told of their end, and that nothing of them is left."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.engine.servers.process import ServerProcess
from strop.errors import EngineLost

_SLEEP = "import time; time.sleep(600)"


async def _yes():
    return True


async def _no():
    return False


def _start(code, log, *, is_ready=_yes, deadline_s=10.0):
    return ServerProcess.start(
        [sys.executable, "-I", "-S", "-c", code], env=dict(os.environ), log=log, is_ready=is_ready, deadline_s=deadline_s
    )


def _is_there(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait_until(is_so, *, limit_s=10.0):
    deadline = time.monotonic() + limit_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _reports_pid(folder, name):
    return f"import os; open({str(folder)!r} + '/{name}.new', 'w').write(str(os.getpid()));" + (
        f" os.rename({str(folder)!r} + '/{name}.new', {str(folder)!r} + '/{name}');"
    )


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "engine.log"


def test_a_program_is_started_when_it_says_so_and_gone_when_it_is_stopped(log):
    async def scenario():
        async def is_ready():
            return log.exists() and "ready" in log.read_text()

        process = await _start(f"print('ready', flush=True); {_SLEEP}", log, is_ready=is_ready)
        assert process.is_alive
        assert process.end == ""
        assert _is_there(process.pid)
        await process.stop()
        assert not process.is_alive
        assert not _is_there(process.pid)
        assert process.end == "was killed by SIGTERM"
        await process.stop()

    asyncio.run(scenario())


def test_a_program_that_ignores_sigterm_is_killed_after_the_grace(log):
    async def scenario():
        async def is_ready():
            return "deaf" in log.read_text()

        code = f"import signal; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); {_SLEEP}"
        process = await _start(code, log, is_ready=is_ready)
        await process.stop(grace_s=0.2)
        assert process.end == "was killed by SIGKILL"
        assert not _is_there(process.pid)

    asyncio.run(scenario())


def test_a_program_that_was_stopped_by_a_signal_can_be_ended(log):
    async def scenario():
        process = await _start(_SLEEP, log)
        os.kill(process.pid, signal.SIGSTOP)
        assert process.is_alive
        await process.stop(grace_s=0.1)
        assert not _is_there(process.pid)

    asyncio.run(scenario())


def test_a_program_that_ends_before_it_is_ready_is_named_with_the_end_of_its_log(log):
    log.parent.mkdir()
    log.write_text("of an earlier program\n")
    with pytest.raises(EngineLost, match=r"(?s)sys\.exit.*ended with exit code 3 before it was ready.*\n  no weights") as lost:
        asyncio.run(_start("import sys; print('no weights', flush=True); sys.exit(3)", log, is_ready=_no))
    assert "earlier" not in str(lost.value)


def test_a_program_that_is_not_ready_in_time_is_named_and_gone(log, tmp_path):
    with pytest.raises(EngineLost, match=r"was not ready within 0\.5 s"):
        asyncio.run(_start(_reports_pid(tmp_path, "pid") + _SLEEP, log, is_ready=_no, deadline_s=0.5))
    assert not _is_there((tmp_path / "pid").read_text())


def test_a_command_that_does_not_exist_is_named(log):
    async def scenario():
        await ServerProcess.start(["/no/such/python", "-m", "x"], env={}, log=log, is_ready=_no, deadline_s=10)

    with pytest.raises(EngineLost, match=r"/no/such/python -m x could not be run: No such file"):
        asyncio.run(scenario())


def test_the_end_of_a_program_is_noticed_and_told(log):
    async def scenario():
        process = await _start(_SLEEP, log)
        os.kill(process.pid, signal.SIGKILL)
        await asyncio.wait_for(process.wait(), 5)
        assert process.end == "was killed by SIGKILL"
        await process.stop()

    asyncio.run(scenario())


def test_what_a_program_started_ends_with_it_even_in_a_session_of_its_own(log, tmp_path):
    grandchild = _reports_pid(tmp_path, "pid") + _SLEEP
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True); {_SLEEP}"

    async def scenario():
        process = await _start(code, log)
        await asyncio.to_thread(_wait_until, (tmp_path / "pid").exists)
        pid = (tmp_path / "pid").read_text()
        assert _is_there(pid)
        await process.stop()
        assert not _is_there(pid)

    asyncio.run(scenario())


_STARTER = """
import asyncio, os, sys, threading, time
from pathlib import Path
from strop.engine.servers.process import ServerProcess

async def yes(): return True

async def start():
    folder = Path(sys.argv[1])
    process = await ServerProcess.start([sys.executable, "-c", sys.argv[2]], env=dict(os.environ), log=folder / "log",
                                        is_ready=yes, deadline_s=10)
    await asyncio.sleep(600)

thread = threading.Thread(target=lambda: asyncio.run(start()))  # not the main one: no death signal hangs on it
thread.start()
thread.join()
"""


@pytest.mark.slow  # the starter imports the package
def test_nothing_outlives_a_starter_that_is_killed(tmp_path):
    grandchild = _reports_pid(tmp_path, "grandchild") + _SLEEP
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {grandchild!r}], start_new_session=True);" + (
        _reports_pid(tmp_path, "child") + _SLEEP
    )
    starter = subprocess.Popen([sys.executable, "-c", _STARTER, str(tmp_path), code])
    try:
        _wait_until(lambda: all((tmp_path / name).exists() for name in ("child", "grandchild")), limit_s=60)
        pids = [(tmp_path / name).read_text() for name in ("child", "grandchild")]
        assert all(map(_is_there, pids))
        starter.kill()
        _wait_until(lambda: not any(map(_is_there, pids)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            starter.kill()
        starter.wait()


def test_a_program_ends_when_its_reaper_is_killed(log):
    async def scenario():
        process = await _start(_SLEEP, log)
        reaper = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(reaper, signal.SIGKILL)
        await asyncio.wait_for(process.wait(), 5)
        assert "reaper was killed" in process.end
        await asyncio.to_thread(_wait_until, lambda: not _is_there(process.pid))
        await process.stop()

    asyncio.run(scenario())
