"""Several processes that make each call together, started by Ray on the nodes of a cluster."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
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

from strop.cluster.connection import LOGS, enter, first_line, leave
from strop.cluster.placement import Node
from strop.errors import ActorsLost, StropError
from strop.user_code import blame

_GRACE_S = 10.0  # for the other processes, when one has reported a fault or shall end
_LOOK_S = 1.0  # between two looks whether all are running
_KILL_S = 2.0  # until a process that Ray is to end is killed
_TAIL_CHARS = 2_000  # of a log, in a message
_NOT_RUNNING = {"T": "was stopped", "t": "was stopped", "Z": "ended", "X": "ended", "": "ended"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What went wrong in a call, instead of its result."""

    error: Exception | None  # where it can be raised elsewhere as it is
    text: str


class Host:
    """One object in a process of its own."""

    def __init__(self, path: Sequence[str], log: Path) -> None:
        """Look for modules in `path`, and print into the file `log`."""
        sys.path[:] = [*path, *(entry for entry in sys.path if entry not in path)]  # nodes may have theirs elsewhere
        with log.open("ab") as output:
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

        return attempt(make)

    def call(self, message: bytes) -> bytes:
        def call() -> Any:
            name, arguments = pickle.loads(message)
            return self._held(name, *arguments)

        return attempt(call)


def attempt(call: Callable[[], Any]) -> bytes:
    try:
        return pickle.dumps(call())
    except Exception as raised:  # noqa: BLE001 - the caller raises it
        return fault_of(raised)


def fault_of(raised: Exception) -> bytes:
    traceback.print_exception(raised)
    error = blame(raised) or raised
    is_plain = isinstance(error, StropError | ValueError) and _can_be_sent(error)
    return pickle.dumps(Fault(error=error if is_plain else None, text=f"{type(error).__name__}: {error}"))


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an exception may do anything when it is copied
        return False
    return True


class Actors:
    """`num` processes that hold an object each. A call is made on all of them; its result is that of the first.

    Ray starts the processes and ends them with this one, however it ends. When one of them dies, hangs or breaks, all are
    ended and every call raises `ActorsLost`, which names it.

    Args:
        what: the processes in words, for messages.
        key: of the recipe, that asks for them.
        timeout_s: of one call.
        nodes: of each process; this machine when not given.
        gpus: that Ray gives each process, which sees no others. 0: it sees those of the machine.

    Raises:
        UserError: Ray is not installed.
        ActorsLost: Ray could not start the processes.
    """

    def __init__(
        self, num: int, *, what: str, key: str, timeout_s: float, nodes: Sequence[Node] = (), gpus: float = 0.0
    ) -> None:
        self._connection = enter(key)
        self._ray = self._connection.ray
        self._is_open = True
        self._what, self._timeout_s = what, timeout_s
        self.nodes = list(nodes) or [self._connection.here()] * num
        self._lost = ""
        self._silent: Node | None = None
        self._lock = threading.RLock()  # `close` is also called within a call
        self._ended = threading.Event()
        self._logs = Path(tempfile.mkdtemp(prefix="strop-actors-", dir=self._connection.directory))
        host = self._ray.remote(Host)
        self.pids: list[int] = []
        self._actors: list[Any] = []
        try:
            for node in set(self.nodes):
                self._connection.reach(node)
            for number, node in enumerate(self.nodes):
                self._actors.append(
                    host.options(**self._connection.options(node, gpus)).remote(import_path(), self._log(number))
                )
            self.pids = self._ray.get([actor.pid.remote() for actor in self._actors], timeout=timeout_s)
            threading.Thread(target=self._watch, daemon=True).start()
        except self._ray.exceptions.RayError as error:
            self.close()
            raise ActorsLost(f"{key}: Ray did not start {num} processes: {first_line(error)}. {LOGS}") from error
        except BaseException:
            self.close()
            raise

    def make(self, kind: Callable[..., Any], arguments_of: Sequence[tuple[Any, ...]]) -> None:
        """Make the object of each process: `kind(*arguments)`, which is called as (name, *arguments).

        Raises what all of them raise, and `ActorsLost`.
        """
        self._on_all("start", [pickle.dumps((kind, arguments)) for arguments in arguments_of], is_start=True)

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
        return self._on_all(name, [message] * len(self._actors))

    def nodes_elsewhere(self) -> list[Node | None]:
        """Return the node of each process; None is this machine."""
        return [None if self._connection.is_here(node) else node for node in self.nodes]

    def close(self) -> None:
        """End all processes, after the running call or a short time, and Ray with the last of them. Safe to call twice."""
        self._ended.set()
        is_idle = self._lock.acquire(timeout=_GRACE_S)
        try:
            for actor in self._actors:
                with contextlib.suppress(Exception):  # Ray may have ended
                    self._ray.kill(actor)
            for node, pids in self._pids_by_node().items():
                if node != self._silent:
                    with contextlib.suppress(ActorsLost):  # the node is gone
                        self._connection.run(node, end_processes, pids)
            self._actors, self.pids = [], []
            shutil.rmtree(self._logs, ignore_errors=True)
            self._lost = self._lost or f"{self._what} is closed"
            if self._is_open:
                self._is_open = False
                leave()
        finally:
            if is_idle:
                self._lock.release()

    def _on_all(self, call: str, messages: Sequence[bytes], *, is_start: bool = False) -> Any:
        with self._lock:
            if self._lost:
                raise ActorsLost(self._lost)
            copies = {message: self._ray.put(message) for message in messages}  # one for all processes of a machine
            hosts = [actor.make if is_start else actor.call for actor in self._actors]
            refs = [host.remote(copies[message]) for host, message in zip(hosts, messages, strict=True)]
            return self._collect(call, refs)

    def _collect(self, call: str, refs: list[Any]) -> Any:
        answers: dict[int, Any] = {}
        # Processes that wait for another one say so after the timeout; the grace is for what they say.
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        while missing := [ref for number, ref in enumerate(refs) if number not in answers]:
            left_s = deadline - time.monotonic()
            ready, _ = self._ray.wait(missing, num_returns=1, timeout=max(0.0, min(_LOOK_S, left_s)))
            if not ready:
                if left_s <= 0:
                    break
                self._check_running(call)
                continue
            number = refs.index(ready[0])
            try:
                answers[number] = pickle.loads(self._ray.get(ready[0]))
            except self._ray.exceptions.RayError as error:
                raise self._lose(f"{self._name(number)} ended during {call}: {first_line(error)}", number) from error
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

    def _watch(self) -> None:
        """Notice a loss between calls; the next call raises it."""
        while not self._ended.wait(_LOOK_S):
            if self._lock.acquire(blocking=False):
                try:
                    if not self._ended.is_set():
                        self._check_running("a wait")
                except ActorsLost:
                    pass
                finally:
                    self._lock.release()

    def _check_running(self, call: str) -> None:
        """Raises `ActorsLost` for a stopped process or a silent node, which Ray does not report, or late."""
        by_node = self._pids_by_node()
        if (silent := self._connection.find_silent(list(by_node))) is not None:
            self._silent, number = silent, self.nodes.index(silent)
            raise self._lose(f"{self._name(number)}: its node was silent during {call}", number)
        for node, pids in by_node.items():
            for pid, what in self._connection.run(node, _not_running, pids).items():
                number = self.pids.index(pid)
                raise self._lose(f"{self._name(number)} {what} during {call}", number)

    def _pids_by_node(self) -> dict[Node, list[int]]:
        """Return the processes that have started, by node."""
        found: dict[Node, list[int]] = {}
        for node, pid in zip(self.nodes, self.pids, strict=False):
            found.setdefault(node, []).append(pid)
        return found

    def _name(self, number: int) -> str:
        node = self.nodes[number]
        place = f"process {self.pids[number]}" + ("" if self._connection.is_here(node) else f" on {node}")
        return f"rank {number} of {len(self.pids)} of {self._what} ({place})"

    def _log(self, number: int) -> Path:
        return self._logs / f"rank-{number}.log"

    def _lose(self, what: str, number: int) -> ActorsLost:
        self._lost = f"{what}. {end_of_log(self._log(number))}"
        self.close()
        self._connection.note("process_lost", process=self._what, node=str(self.nodes[number]), reason=what)
        return ActorsLost(self._lost)


def _not_running(pids: Sequence[int]) -> dict[int, str]:
    """Return those of `pids` on this machine that have ended, or that a signal or a debugger has stopped."""
    return {pid: _NOT_RUNNING[state] for pid in pids if (state := state_of(pid)) in _NOT_RUNNING}


def state_of(pid: int) -> str:
    """Return the letter of a process's state, as in /proc; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return ""


def import_path() -> list[str]:
    """Return that of this process; what is called may be of any module."""
    return [entry or os.getcwd() for entry in sys.path]


def end_of_log(log: Path) -> str:
    end = log.read_text(errors="replace")[-_TAIL_CHARS:].strip()
    return f"Its log ends:\n{end or '(it is empty)'}"


def end_processes(pids: Sequence[int]) -> None:
    """Wait until processes of this machine that Ray ends have ended, and kill the others."""
    if not _have_ended(pids, within_s=_KILL_S):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # what is stopped does not hear Ray
        _have_ended(pids, within_s=_GRACE_S)


def _have_ended(pids: Sequence[int], *, within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while left := any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() >= deadline:
            break
        time.sleep(0.01)
    return not left
