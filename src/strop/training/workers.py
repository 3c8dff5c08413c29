"""Starts the processes that divide one model, and makes every call of `Learner` on all of them."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from strop.errors import TrainerLost
from strop.training.assembly import LearnerOptions
from strop.training.batch import TokenBatch
from strop.training.optimizer import UpdateReport
from strop.training.weights import WriteCheckpoint
from strop.training.worker import Fault

_COMMAND = "from strop.training.worker import main; main()"  # what is run as a module has classes of its own
_GRACE_S = 10.0  # for the other workers, when one has reported a fault or shall end
_TAIL_CHARS = 2_000  # of a log, in a message


class LearnerGroup:
    """The calls of `Learner`, each made on all ranks; the result is that of the first rank.

    The processes are started here and end with this one, however it ends. When one of them dies, hangs or breaks, all are
    ended and every call raises `TrainerLost`, which names it.
    """

    def __init__(self, options: LearnerOptions) -> None:
        """Start the processes and wait until all have loaded the model. Raises as `open_learner`, and `TrainerLost`."""
        self._timeout_s = options.config.worker_timeout_s
        self._directory = Path(tempfile.mkdtemp(prefix="strop-trainer-"))
        self._lost = ""
        self._lock = threading.Lock()  # a snapshot is written in a thread of its own
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        try:
            for rank in range(options.config.workers):
                self._start(rank, options.config.workers)
            self._collect("start", pickle.dumps(options))
            self.num_updates: int = self._ask("num_updates")
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._ask, name)

    def update(self, batch: TokenBatch, *functions: Callable[..., Any]) -> UpdateReport:
        report: UpdateReport = self._ask("update", batch, *functions)
        self.num_updates = report.update
        return report

    def load(self, directory: Path) -> None:
        self._ask("load", directory)
        self.num_updates = self._ask("num_updates")

    def snapshot_writer(self) -> WriteCheckpoint:
        self._ask("snapshot")
        return partial(self._ask, "write_snapshot")

    def _ask(self, call: str, *arguments: Any) -> Any:
        """Return the first rank's answer when all have answered."""
        try:
            message = pickle.dumps((call, arguments))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{call}: {error}: this cannot be sent to the trainer's processes. Pass functions of a module, or methods of a"
                " value that can be pickled; no lambda and no local function."
            ) from error
        with self._lock:
            if self._lost:
                raise TrainerLost(self._lost)
            return self._collect(call, message)

    def _collect(self, call: str, message: bytes) -> Any:
        answers: dict[int, Any] = {}
        # Ranks that wait for another one say so after the timeout; the grace is for what they say.
        deadline = time.monotonic() + self._timeout_s + _GRACE_S
        rank = 0
        try:
            for rank, connection in enumerate(self._connections):  # noqa: B007 - whose it was, if this fails
                connection.send_bytes(message)
            while missing := {each: rank for rank, each in enumerate(self._connections) if rank not in answers}:
                ready = wait(list(missing), timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    break
                for connection, rank in missing.items():
                    if connection in ready:
                        answers[rank] = connection.recv()
                        if isinstance(answers[rank], Fault):
                            deadline = min(deadline, time.monotonic() + _GRACE_S)
        except (EOFError, OSError):  # its end of the socket is closed
            raise self._lose(f"{self._name(rank)} {self._how_it_ended(rank)} during {call}", rank) from None
        faults = {rank: answer for rank, answer in answers.items() if isinstance(answer, Fault)}
        silent = [rank for rank in range(len(self._processes)) if rank not in answers]
        if len(faults) == len(self._processes) and (error := faults[0].error) is not None:
            raise error  # what all ranks report is the caller's mistake
        if silent or faults:
            what = [f"{self._name(each)} gave no answer to {call}" for each in silent]
            what += [f"{self._name(each)} broke during {call}: {fault.text}" for each, fault in faults.items()]
            raise self._lose("; ".join(what), silent[0] if silent else next(iter(faults)))
        return answers[0]

    def _name(self, rank: int) -> str:
        return f"rank {rank} of {len(self._processes)} of the trainer (process {self._processes[rank].pid})"

    def _how_it_ended(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "hung up"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def _lose(self, what: str, rank: int) -> TrainerLost:
        log = (self._directory / f"rank-{rank}.log").read_text(errors="replace")[-_TAIL_CHARS:].strip()
        self._lost = f"{what}. The weights in memory are lost; what is left is the last checkpoint. Its log ends:\n{log}"
        self.close()
        return TrainerLost(self._lost)

    def _start(self, rank: int, num_ranks: int) -> None:
        ours, theirs = Pipe()
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path),  # a loss may be of any module
            "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // num_ranks)),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),  # all are here; a host name need not resolve
        }
        arguments = [theirs.fileno(), rank, num_ranks, self._directory]
        with theirs, (self._directory / f"rank-{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, *map(str, arguments)],
                stdin=subprocess.PIPE,  # its other end closes with this process
                stdout=log,
                stderr=log,
                pass_fds=(theirs.fileno(),),
                env=environment,
                start_new_session=True,  # an interrupt is for this process, which then ends them
            )
        self._processes.append(process)
        self._connections.append(ours)

    def close(self) -> None:
        """End all processes: by themselves if they can, else by a signal. May be called twice."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended already
                if not self._lost:
                    connection.send(("close", ()))
            connection.close()
        deadline = time.monotonic() + (0.0 if self._lost else _GRACE_S)
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdin is not None
            process.stdin.close()
        self._connections = []
        shutil.rmtree(self._directory, ignore_errors=True)
        self._lost = self._lost or "the trainer is closed"
