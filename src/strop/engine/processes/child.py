"""The program that forks processes of engines, and the life of such a process.

The program imports everything once, then forks for each order that comes. An import of torch and transformers takes seconds of
processor time; a fork takes milliseconds and shares what was imported. The program never computes: it has one thread, and no
CUDA context, or a fork of it would not work. Its argument is an inherited descriptor: the link to its client.

A child opens a `TorchEngine`, then does what its client says until that hangs up. Its event loop computes nothing, so it
answers a ping while the engine's own thread is busy with a model step.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import functools
import gc
import json
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from strop.config import Config
from strop.engine.config import EngineConfig
from strop.engine.model_directory import config_of, has_tokenizer
from strop.engine.processes.fork_server import MAX_ORDER_BYTES
from strop.engine.processes.link import (
    FROM_CHILD,
    TO_CHILD,
    Abandon,
    Abort,
    Cancelled,
    Complete,
    Completed,
    Failed,
    FromChild,
    Hello,
    Load,
    Loaded,
    Ping,
    Pong,
    Probed,
    Release,
    ToChild,
    read_message,
    to_frame,
)
from strop.engine.protocol import Probe
from strop.engine.publication import Publication
from strop.engine.torch.cpu.resources import keep_little_freed_memory
from strop.engine.torch.engine import TorchEngine
from strop.errors import StropError

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class EngineOrder(Config):
    """What a process is to open."""

    model: str  # a directory
    config: EngineConfig
    version: int | None  # of the directory's weights; None: the engine waits for a publication
    environment: dict[str, str]  # added to the environment of the fork server


def main() -> int:
    link = socket.socket(fileno=int(sys.argv[1]))
    woken, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gc.collect()
    gc.freeze()  # a collection in a child would touch, and so copy, every page
    _tell(link, {"ready": len(os.listdir("/proc/self/task"))})  # threads; imports may start some
    poll = select.poll()
    poll.register(link, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == woken:
                os.read(woken, 4096)
                continue
            said, descriptors, _, _ = socket.recv_fds(link, MAX_ORDER_BYTES, 2)
            if not said:
                return 0  # the children get a death signal, and the reaper kills the rest
            _obey(link, json.loads(said), descriptors)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                _tell(link, {"died": ended[0], "status": os.waitstatus_to_exitcode(ended[1])})


def _obey(link: socket.socket, said: dict[str, object], descriptors: list[int]) -> None:
    if "kill" in said:
        with contextlib.suppress(ProcessLookupError):  # only this process reaps it, so the pid is not reused
            os.kill(int(str(said["kill"])), signal.SIGKILL)
        return
    fork_server = os.getpid()
    if (pid := os.fork()) == 0:
        status = 1
        try:
            link.close()
            status = _begin(fork_server, said, descriptors)
        except BaseException:  # noqa: BLE001 - the last words of this process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for descriptor in descriptors:
        os.close(descriptor)
    _tell(link, {"born": said["fork"], "pid": pid})


def _begin(fork_server: int, said: dict[str, object], descriptors: list[int]) -> int:
    """The life of a child. Returns its exit code."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != fork_server:
        return 1
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    theirs, log = descriptors
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)
    order = EngineOrder.model_validate_json(json.dumps(said["order"]))
    os.environ.update(order.environment)
    return live(order, socket.socket(fileno=theirs))


def _tell(link: socket.socket, message: dict[str, object]) -> None:
    with contextlib.suppress(OSError):  # the client has gone: seen by the next look
        link.send(json.dumps(message).encode())


def live(order: EngineOrder, link: socket.socket) -> int:
    """Until the client hangs up. Returns the exit code."""
    keep_little_freed_memory()
    return asyncio.run(_serve(order, link))


async def _serve(order: EngineOrder, link: socket.socket) -> int:
    reader, writer = await asyncio.open_connection(sock=link)
    try:
        engine, hello = await asyncio.to_thread(_open, order)
    except Exception as error:  # noqa: BLE001 - whatever keeps it from opening is for the client to raise
        writer.write(to_frame(FROM_CHILD, _failed(0, error)))
        await writer.drain()
        return 1
    writer.write(to_frame(FROM_CHILD, hello))
    await _Service(engine, reader, writer).run()
    return 0


def _open(order: EngineOrder) -> tuple[TorchEngine, Hello]:
    path = Path(order.model)
    model_config = config_of(path)
    detokenize = _detokenizer(path)
    if order.version is None:
        engine = TorchEngine(model_config, order.config, detokenize=detokenize)
    else:
        engine = TorchEngine.from_directory(path, order.config, version=order.version, detokenize=detokenize)
    capabilities, capacity = engine.capabilities, engine.capacity
    return engine, Hello(
        dtype=order.config.dtype,
        total_tokens=capacity.total_tokens,
        max_request_tokens=capacity.max_request_tokens,
        max_running=capacity.max_running,
        vocab_size=model_config.vocab_size,
        policy_version=engine.policy_version,
        is_deterministic=capabilities.is_deterministic,
        can_fork=capabilities.can_fork,
        entropies=capabilities.entropies,
    )


def _detokenizer(path: Path) -> Callable[[Sequence[int]], str] | None:
    """That of the model's tokenizer, which is loaded when a stop string needs it; None when the directory has none."""
    if not has_tokenizer(path):
        return None

    @functools.cache
    def tokenizer() -> Any:
        return AutoTokenizer.from_pretrained(path)

    return lambda ids: str(tokenizer().decode(list(ids)))


class _Service:
    """What one client asks of one engine, in the order in which it asks."""

    def __init__(self, engine: TorchEngine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._engine, self._reader, self._writer = engine, reader, writer
        self._completions: dict[int, asyncio.Task[None]] = {}
        self._loading = asyncio.Lock()
        self._loads: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        with contextlib.suppress(EOFError):
            while True:
                await self._obey(await read_message(TO_CHILD, self._reader))
                await asyncio.sleep(0)  # a task that this order began reaches the engine before the next order does

    async def _obey(self, order: ToChild) -> None:
        match order:
            case Ping():
                self._answer(Pong(progress=self._engine.num_steps))
            case Complete():
                task = asyncio.create_task(self._complete(order))
                self._completions[order.number] = task
                task.add_done_callback(lambda _: self._completions.pop(order.number))
            case Abandon():
                if task_abandoned := self._completions.get(order.number):
                    task_abandoned.cancel()
            case Abort():
                await self._engine.abort(order.request_id)  # neither waits for anything
            case Release():
                await self._engine.release(order.request_id)
            case Load():
                load = asyncio.create_task(self._load_weights(order))
                self._loads.add(load)
                load.add_done_callback(self._loads.discard)

    async def _complete(self, order: Complete) -> None:
        def tell(entropies: tuple[float, ...]) -> None:
            self._answer(Probed(number=order.number, entropies=entropies))

        try:
            probe = Probe(num_tokens=order.probe_tokens, tell=tell) if order.probe_tokens else None
            completion = await self._engine.complete(order.request, probe=probe)
        except asyncio.CancelledError:
            self._answer(Cancelled(number=order.number))
        except Exception as error:  # noqa: BLE001 - for the client to raise
            self._answer(_failed(order.number, error))
        else:
            self._answer(Completed(number=order.number, completion=completion))

    async def _load_weights(self, order: Load) -> None:
        publication = Publication.in_files(Path(order.directory), version=order.version, checksum=order.checksum)
        try:
            async with self._loading:  # a client that went away has left a load that still runs
                await self._engine.load_weights(publication)
        except Exception as error:  # noqa: BLE001 - for the client to raise
            self._answer(_failed(order.number, error))
        else:
            is_deterministic = self._engine.capabilities.is_deterministic
            self._answer(Loaded(number=order.number, policy_version=order.version, is_deterministic=is_deterministic))

    def _answer(self, message: FromChild) -> None:
        self._writer.write(to_frame(FROM_CHILD, message))


def _failed(number: int, error: Exception) -> Failed:
    """In the words of the error; one of no class of ours is the engine's end."""
    is_ours = isinstance(error, StropError)
    message = str(error) if is_ours else f"its process failed with {type(error).__name__}: {error}"
    if _is_out_of_memory(error) or _is_out_of_memory(error.__cause__):
        message += " (out of memory). Lower engine.slots or engine.max_length, or use fewer engines."
    return Failed(number=number, error=type(error).__name__ if is_ours else "EngineLost", message=message)


def _is_out_of_memory(error: BaseException | None) -> bool:
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's allocator for the CPU
    )


if __name__ == "__main__":
    sys.exit(main())
