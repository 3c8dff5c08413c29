"""One rank of a trainer over several processes: makes the calls of its `Learner` that the parent asks for.

Started by `strop.training.workers` with the arguments SOCKET RANK SIZE DIRECTORY. Its stdin ends with the parent.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from strop.errors import StropError
from strop.training.assembly import LearnerOptions, open_learner
from strop.training.batch import World
from strop.training.learner import Learner
from strop.training.weights import Snapshot
from strop.user_code import blame


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What went wrong in a call, instead of its result."""

    error: Exception | None  # where it can be raised in the parent as it is
    text: str


def serve(connection: Connection, learner: Learner) -> None:
    """Answer until the parent says that it is done, or is gone. Only the first rank sends results."""
    snapshots: list[Snapshot] = []

    def call(name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "write_snapshot":
            return snapshots.pop().write(*arguments)
        found = getattr(learner, name)
        result = found(*arguments) if callable(found) else found
        if isinstance(result, Snapshot):
            snapshots[:] = [result]
            return None
        return result if learner.world.rank == 0 else None

    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        if name == "close":
            return
        _send(connection, _attempt(lambda: call(name, arguments)))  # noqa: B023 - called at once


def _send(connection: Connection, answer: Any) -> None:
    connection.send_bytes(pickle.dumps(answer))  # torch makes `send` share files of tensors, which end with this process


def _attempt(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as raised:  # noqa: BLE001 - the parent raises it
        traceback.print_exc()
        error = blame(raised) or raised
        is_plain = isinstance(error, StropError | ValueError) and _can_be_sent(error)
        return Fault(error=error if is_plain else None, text=f"{type(error).__name__}: {error}")


def _can_be_sent(error: Exception) -> bool:
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - an exception may do anything when it is copied
        return False
    return True


def _end_with_parent(directory: str) -> None:
    """The parent never writes to the pipe: a read returns only when the parent is gone."""

    def watch() -> None:
        os.read(0, 1)
        shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="strop-lifeline").start()


def main() -> None:
    socket, rank, size = map(int, sys.argv[1:4])
    directory = sys.argv[4]
    _end_with_parent(directory)
    connection = Connection(socket)
    options: LearnerOptions = connection.recv()
    config = options.config.model_copy(update={"device": str(options.config.torch_device)})
    if config.device == "cuda":
        torch.cuda.set_device(rank)
        config = config.model_copy(update={"device": f"cuda:{rank}"})
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and config.device != "cpu" else "gloo",
        init_method=f"file://{directory}/rendezvous",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=config.worker_timeout_s),
    )
    try:
        learner = _attempt(lambda: open_learner(replace(options, config=config), World(rank, size)))
        _send(connection, learner if isinstance(learner, Fault) else None)
        if not isinstance(learner, Fault):
            serve(connection, learner)
    finally:
        dist.destroy_process_group()
