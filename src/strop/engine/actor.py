"""An engine in a separate process, here or on another node: the failure of one does not end the others.

Ray starts the process. Whatever shows that it cannot be trusted any more (it died, fell silent, ran out of memory) ends it, and
with it every request, by `EngineLost`. A slow request is another matter: the process answers pings from a thread that computes
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import torch

from strop.cluster.actors import Actor
from strop.cluster.placement import Node
from strop.engine.config import AnyEngine, EngineChoice, EngineConfig, ServerConfig
from strop.engine.model_directory import has_tokenizer
from strop.engine.protocol import Capabilities, Capacity, CompletionRequest, InferenceEngine, Probe, SleepingEngine
from strop.engine.publication import Publication
from strop.engine.published_files import naming_damage
from strop.engine.servers.process import num_oom_kills
from strop.engine.torch.cpu.resources import keep_little_freed_memory
from strop.engine.torch.engine import TorchEngine
from strop.errors import ActorsLost, EngineLost, StropError, WeightsNotProven
from strop.types import Completion


class ActorEngine:
    """An `InferenceEngine` that lives in a process of its own, next to its server if it has one; its semantics are the same.

    Anything that the process does wrong is its end: it is killed, and every request, outstanding or later, raises `EngineLost`
    with the engine's name, its process id and the reason.
    """

    def __init__(
        self, name: str, config: AnyEngine, actor: Actor, oom_kills: int, described: tuple[Capabilities, Capacity, int]
    ) -> None:
        """Of a process that has opened its engine; `start` is what others call."""
        self.name = name
        self._config, self._actor, self._oom_kills = config, actor, oom_kills
        self.capabilities, self.capacity, self.policy_version = described
        self._load_s = config.stall_timeout_s + (config.start_timeout_s if isinstance(config, ServerConfig) else 0.0)
        self._numbers = itertools.count()  # of requests with a probe
        self._doubt = ""  # empty: what the process itself says of its weights counts

    @classmethod
    async def start(
        cls,
        model_directory: Path,
        config: EngineChoice,
        *,
        name: str,
        log: Path,
        environment: Mapping[str, str] | None = None,
        node: Node | None = None,
        gpus: float = 0.0,
    ) -> Self:
        """An engine with the weights of a `transformers` model directory, as version 0, and its tokenizer for stop strings.

        Args:
            name: for messages.
            log: what the process prints is appended here.
            environment: variables added to the process's environment, such as CUDA_VISIBLE_DEVICES.
            node: None is this machine.
            gpus: that the process sees. 0: those of the machine.

        Raises:
            UserError: Ray is not installed.
            ModelError: no such model, its weights are not safetensors or not those of its config, or it is not implemented.
            EngineLost: the process did not start.
        """
        oom_kills = num_oom_kills()
        with _as_engine(oom_kills):
            actor = await Actor.start(
                _HostedEngine.open,
                *(model_directory.absolute(), config, name, log.absolute().parent),
                what=f"engine {name}",
                key="engine.own_process",
                log=log.absolute(),
                environment=environment or {},
                node=node,
                gpus=gpus,
            )
            try:
                return cls(name, config, actor, oom_kills, await actor.call("describe"))
            except BaseException:
                await actor.close()
                raise

    async def complete(self, request: CompletionRequest) -> Completion:
        """See `TorchEngine.complete`, which this equals in all that it returns and raises."""
        if self._doubt:
            raise WeightsNotProven(f"{self._doubt}. Publish weights to the engine again before sampling from it.")
        completion: Completion
        if request.probe is None:
            completion = await self._call("complete", request)
            return completion
        number, num_probed = next(self._numbers), max(1, request.probe.num_tokens)
        try:
            if entropies := await self._call("begin", replace(request, probe=None), number, num_probed):
                request.probe.tell(entropies)
            completion = await self._call("result", number)
        except asyncio.CancelledError:
            self._actor.tell("drop", number)
            raise
        return completion

    async def progress(self) -> int:
        num_steps: int = await self._call("progress")
        return num_steps

    async def abort(self, request_id: str) -> None:
        self._actor.tell("abort", request_id)

    async def release(self, request_id: str) -> None:
        self._actor.tell("release", request_id)

    async def load_weights(self, publication: Publication) -> None:
        """See `TorchEngine.load_weights`. The process reads files, and proves what it holds.

        A load that does not end within `stall_timeout_s`, and a server's `start_timeout_s`, is the end of the engine.
        """
        if not publication.keeps_requests:  # else turns that begin while files are copied are of the older weights
            self._doubt = f"the last publication (version {publication.version}) was not completed"
        try:
            directory, checksum = await publication.files(self._actor.elsewhere), await publication.checksum()
        except ActorsLost as error:
            raise EngineLost(str(self._actor.lose(f"did not get the weights: {error}"))) from error
        files = (directory, publication.version, checksum, publication.keeps_requests)
        self._doubt = ""  # requests that come now wait in the engine
        try:
            async with asyncio.timeout(self._load_s):
                version, self.capabilities = await self._call("load_weights", *files)
        except TimeoutError as error:
            within = f"within {self._load_s:g} s (engine.stall_timeout_s)"
            raise EngineLost(str(self._actor.lose(f"hangs: it did not load weights {within}"))) from error
        except WeightsNotProven as error:
            self._doubt = ""  # the process itself refuses to sample
            raise WeightsNotProven(f"{self._actor.title}: {error}") from error
        if version != publication.version:
            why = f"is lost: it says that it holds version {version} after {publication.version} was published"
            raise EngineLost(str(self._actor.lose(why)))
        self.policy_version = version

    async def sleep(self) -> None:
        """See `SleepingEngine.sleep`; of an engine that is one."""
        await self._call("sleep")

    async def close(self) -> None:
        """End the process; whatever is outstanding fails with `EngineLost`. Safe to call twice."""
        await self._actor.shut_down()

    async def _call(self, name: str, *arguments: Any) -> Any:
        with _as_engine(self._oom_kills):
            try:
                return await self._actor.call(name, *arguments)
            except WeightsNotProven:
                raise
            except EngineLost as error:  # the engine itself has ended
                raise self._actor.lose(f"is lost: {error}") from error


@contextlib.contextmanager
def _as_engine(oom_kills: int) -> Iterator[None]:
    try:
        yield
    except ActorsLost as error:
        memory = " The machine ran out of memory (the kernel's OOM killer was at work)." if num_oom_kills() > oom_kills else ""
        raise EngineLost(f"{error}{memory}") from error


class _HostedEngine:
    """What runs in the process."""

    def __init__(self, engine: InferenceEngine) -> None:
        self._engine = engine
        self.progress, self.abort, self.release, self.close = engine.progress, engine.abort, engine.release, engine.close
        self._loading = asyncio.Lock()
        self._begun: dict[int, asyncio.Task[Completion]] = {}

    @classmethod
    async def open(cls, path: Path, config: EngineChoice, name: str, logs: Path) -> Self:
        with _naming_failures():
            if not isinstance(config, EngineConfig):
                from strop.engine.opening import open_engines  # which opens these processes

                [server] = await open_engines(path, config, detokenize=None, logs=logs, names=[f"{name}-server"])
                return cls(server)
            keep_little_freed_memory()
            return cls(TorchEngine.from_directory(path, config, detokenize=_detokenizer(path)))

    async def describe(self) -> tuple[Capabilities, Capacity, int]:
        return self._engine.capabilities, self._engine.capacity, self._engine.policy_version

    async def complete(self, request: CompletionRequest) -> Completion:
        with _naming_failures():
            return await self._engine.complete(request)

    async def begin(self, request: CompletionRequest, number: int, num_probed: int) -> tuple[float, ...]:
        """Begin a completion, of which `result` returns the rest. Return its first entropies; () if it ended before them."""
        probed: asyncio.Future[tuple[float, ...]] = asyncio.get_running_loop().create_future()
        probe = Probe(num_tokens=num_probed, tell=probed.set_result)
        running = self._begun[number] = asyncio.create_task(self.complete(replace(request, probe=probe)))
        either: set[asyncio.Future[Any]] = {probed, running}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        return probed.result() if probed.done() else ()

    async def result(self, number: int) -> Completion:
        return await self._begun.pop(number)

    async def drop(self, number: int) -> None:
        """End a completion that has begun, and whose `result` nothing waits for."""
        if (running := self._begun.pop(number, None)) is not None:
            running.cancel()

    async def sleep(self) -> None:
        with _naming_failures():
            assert isinstance(self._engine, SleepingEngine)
            await self._engine.sleep()

    async def load_weights(
        self, directory: Path, version: int, checksum: str, keeps_requests: bool
    ) -> tuple[int, Capabilities]:
        publication = Publication.in_files(directory, version=version, checksum=checksum, keeps_requests=keeps_requests)
        with _naming_failures():
            # A load whose caller was cancelled may not have ended.
            async with self._loading, naming_damage(directory):
                await self._engine.load_weights(publication)
        return self._engine.policy_version, self._engine.capabilities


def _detokenizer(path: Path) -> Callable[[Sequence[int]], str] | None:
    """That of the model's tokenizer, which is loaded when a stop string needs it; None when the directory has none."""
    if not has_tokenizer(path):
        return None

    @functools.cache
    def tokenizer() -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(path)

    return lambda ids: str(tokenizer().decode(list(ids)))


@contextlib.contextmanager
def _naming_failures() -> Iterator[None]:
    """Raise what is not strop's as `EngineLost`, and say which failure was one of memory."""
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, StropError)
        if is_ours and not _is_out_of_memory(error.__cause__):
            raise
        message = str(error) if is_ours else f"its process failed with {type(error).__name__}: {error}"
        if _is_out_of_memory(error) or _is_out_of_memory(error.__cause__):
            message += " (out of memory). Lower engine.slots or engine.max_length, or use fewer engines."
        raise EngineLost(message) from error


def _is_out_of_memory(error: BaseException | None) -> bool:
    return (
        isinstance(error, (MemoryError, torch.OutOfMemoryError))
        or (isinstance(error, OSError) and error.errno == errno.ENOMEM)
        or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))  # torch's allocator for the CPU
    )
