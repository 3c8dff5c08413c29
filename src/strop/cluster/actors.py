"""Several processes that make each call together, started by Ray."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.errors import ActorsLost, StropError, UserError
from strop.user_code import blame

_GRACE_S = 10.0  # for the other processes, when one has reported a fault or shall end
_KILL_S = 2.0  # until a process that Ray is to end is killed
_TAIL_CHARS = 2_000  # of a log, in a message
_LOGS = "Its logs are in /tmp/ray/session_latest/logs. Start again with the same command."


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What went wrong in a call, instead of its result."""

    error: Exception | None  # where it can be raised elsewhere as it is
    text: str


class _Host:
    """One object in a process of its own."""

    def __init__(self, path: Sequence[str], log: Path) -> None:
        """Look for modules in `path`, and print into the file `log`."""
        sys.path[:] = path
        with log.open("wb") as output:
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
        self._held: Any = None

    def pid(self) -> int:
        return os.getpid()

    def make(self, message: bytes) -> bytes:
        """Make the object: `message` is what makes it, and its arguments."""

        def make() -> None:
            kind, arguments = pickle.loads(message)
            self._held = kind(*arguments)

        return _attempt(make)

    def call(self, message: bytes) -> bytes:
        def call() -> Any:
            name, arguments = pickle.loads(message)
            return self._held(name, *arguments)

        return _attempt(call)


def _attempt(call: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(call())
    except Exception as raised:  # noqa: BLE001 - the caller raises it
        traceback.print_exc()
        error = blame(raised) or raised
        is_plain = isinstance(error, StropError | ValueError) and _can_be_sent(error)
        return pickle.dumps(Fault(error=error if is_plain else None, text=f"{type(error).__name__}: {error}"))


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an exception may do anything when it is copied
        return False
    return True


def check_installed(key: str) -> None:
    """Raises `UserError` if Ray, which `key` of the recipe needs, is not installed. Does not import it."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{key} needs Ray, which is not installed. Install it with: pip install 'strop[cluster]'.")


class Actors:
    """`num` processes that hold an object each. A call is made on all of them; its result is that of the first.

    Ray starts the processes and ends them with this one, however it ends. When one of them dies, hangs or breaks, all are
    ended and every call raises `ActorsLost`, which names it.

    Args:
        what: the processes in words, for messages.
        key: of the recipe, that asks for them.
        timeout_s: of one call.

    Raises:
        UserError: Ray is not installed.
        ActorsLost: Ray could not start the processes.
    """

    def __init__(self, num: int, *, what: str, key: str, timeout_s: float) -> None:
        self._ray = _enter_ray(key)
        self._is_open = True
        self._what, self._timeout_s = what, timeout_s
        self._lost = ""
        self._lock = threading.RLock()  # `close` is also called within a call
        self._temporary = tempfile.TemporaryDirectory(prefix="strop-actors-")
        self.directory = Path(self._temporary.name)  # that all can see; gone after `close`
        host = self._ray.remote(_Host).options(num_cpus=0, max_restarts=0)
        path = [entry or os.getcwd() for entry in sys.path]  # what is called may be of any module
        self._actors: list[Any] = [host.remote(path, self._log(number)) for number in range(num)]
        self.pids: list[int] = []
        try:
            self.pids = self._ray.get([actor.pid.remote() for actor in self._actors], timeout=timeout_s)
        except self._ray.exceptions.RayError as error:
            self.close()
            raise ActorsLost(f"{key}: Ray did not start {num} processes: {_first_line(error)}. {_LOGS}") from error
        except BaseException:
            self.close()
            raise

    def make(self, kind: Callable[..., Any], arguments_of: Sequence[tuple[Any, ...]]) -> None:
        """Make the object of each process: `kind(*arguments)`, which is called as (name, *arguments).

        Raises what all of them raise, and `ActorsLost`.
        """
        refs = [
            actor.make.remote(pickle.dumps((kind, arguments)))
            for actor, arguments in zip(self._actors, arguments_of, strict=True)
        ]
        self._collect("start", refs)

    def call(self, name: str, *arguments: Any) -> Any:
        """Return the first process's result when all have answered.

        Raises:
            ValueError: the arguments cannot be sent.
            ActorsLost: a process is gone, or had not answered in time.
        """
        try:
            message = pickle.dumps((name, arguments))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{name}: {error}: this cannot be sent to {self._what}'s processes. Pass functions of a module, or methods of a"
                " value that can be pickled; no lambda and no local function."
            ) from error
        with self._lock:
            if self._lost:
                raise ActorsLost(self._lost)
            shared = self._ray.put(message)  # one copy for all processes of a machine
            return self._collect(name, [actor.call.remote(shared) for actor in self._actors])

    def close(self) -> None:
        """End all processes, after the running call or a short time, and Ray with the last of them. Safe to call twice."""
        is_idle = self._lock.acquire(timeout=_GRACE_S)
        try:
            for actor in self._actors:
                with contextlib.suppress(Exception):  # Ray may have ended
                    self._ray.kill(actor)
            if not _have_ended(self.pids, within_s=_KILL_S):
                for pid in self.pids:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)  # what is stopped does not hear Ray
                _have_ended(self.pids, within_s=_GRACE_S)
            self._actors, self.pids = [], []
            self._temporary.cleanup()
            self._lost = self._lost or f"{self._what} is closed"
            if self._is_open:
                self._is_open = False
                _leave_ray()
        finally:
            if is_idle:
                self._lock.release()

    def _collect(self, call: str, refs: list[Any]) -> Any:
        answers: dict[int, Any] = {}
        # Processes that wait for another one say so after the timeout; the grace is for what they say.
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        while missing := [ref for number, ref in enumerate(refs) if number not in answers]:
            ready, _ = self._ray.wait(missing, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            number = refs.index(ready[0])
            try:
                answers[number] = pickle.loads(self._ray.get(ready[0]))
            except self._ray.exceptions.RayError as error:
                raise self._lose(f"{self._name(number)} ended during {call}: {_first_line(error)}", number) from error
            if isinstance(answers[number], Fault):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        faults = {number: answer for number, answer in sorted(answers.items()) if isinstance(answer, Fault)}
        silent = [number for number in range(len(refs)) if number not in answers]
        if len(faults) == len(refs) and (mistake := faults[0].error) is not None:
            raise mistake  # what all report is the caller's
        if silent or faults:
            what = [f"{self._name(each)} gave no answer to {call}" for each in silent]
            what += [f"{self._name(each)} broke during {call}: {fault.text}" for each, fault in faults.items()]
            raise self._lose("; ".join(what), next(iter([*faults, *silent])))  # a silent one has nothing in its log
        return answers[0]

    def _name(self, number: int) -> str:
        return f"rank {number} of {len(self.pids)} of {self._what} (process {self.pids[number]})"

    def _log(self, number: int) -> Path:
        return self.directory / f"rank-{number}.log"

    def _lose(self, what: str, number: int) -> ActorsLost:
        end = self._log(number).read_text(errors="replace")[-_TAIL_CHARS:].strip()
        self._lost = f"{what}. Its log ends:\n{end or '(it is empty)'}"
        self.close()
        return ActorsLost(self._lost)


def _have_ended(pids: Sequence[int], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while left := any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return not left


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


_num_users = 0  # of the Ray that was started here


def _enter_ray(key: str) -> Any:
    """Return the module `ray`, connected. Without a connection a cluster of this machine is started."""
    global _num_users
    check_installed(key)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # it listens on all interfaces
    os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")  # else it kills processes where memory is nearly full
    import ray

    if not _num_users and ray.is_initialized():
        raise UserError(f"{key}: this program has called ray.init. Leave that to strop.")
    if not _num_users:
        on_termination = signal.getsignal(signal.SIGTERM)
        try:
            ray.init("local", include_dashboard=False, log_to_driver=False, configure_logging=False, logging_level="ERROR")
        except Exception as error:  # of many classes: whatever keeps it from starting
            raise ActorsLost(f"{key}: Ray did not start: {_first_line(error)}. {_LOGS}") from error
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_termination)  # Ray replaces it
    _num_users += 1
    return ray


def _leave_ray() -> None:
    """End Ray when its last user leaves."""
    global _num_users
    import ray

    _num_users -= 1
    if not _num_users:
        ray.shutdown()
