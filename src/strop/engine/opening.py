"""Opens the engines of a recipe: all of them, or none."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import httpx2

from strop import user_code
from strop.cluster.connection import take_engine_nodes
from strop.cluster.placement import Node
from strop.cluster.ray_setup import check_installed
from strop.engine.config import EngineChoice, EngineConfig, OwnEngine, SglangConfig, VllmConfig
from strop.engine.model_directory import ModelFacts, directory_checksum
from strop.engine.protocol import InferenceEngine
from strop.engine.publication import Publication
from strop.engine.servers.engine import ServerEngine
from strop.engine.servers.server import Server, environment_of
from strop.engine.servers.sglang import SglangServer
from strop.engine.servers.vllm import VllmServer
from strop.errors import EngineLost, UserError

_LACKS = 9  # an exit code that Python does not use
_FIND_S = 60.0
Detokenizer = Callable[[Sequence[int]], str]


async def open_engines(
    model_directory: Path,
    config: EngineChoice,
    *,
    detokenize: Detokenizer | None,
    logs: Path | None = None,
    names: Sequence[str] = (),
) -> list[InferenceEngine]:
    """`config.replicas` engines, or one for each of `config.addresses`, that sample from a model directory as version 0.

    Await it in the event loop in which the engines are used. The caller closes every engine. If one engine cannot be opened,
    all others are closed.

    Args:
        detokenize: ids -> text, for stop strings in the embedded engine. A server uses the model directory's own tokenizer.
        logs: a directory for what servers print; a temporary one when not given.
        names: of the engines, for messages and the files in `logs`; by kind and place when not given.

    Raises:
        UserError: the model, or a server that was given by address, cannot be used as the recipe says; nothing listens at the
            address; `config.python` cannot be run, or its environment lacks the server; several processes need Ray.
        EngineLost: a server did not start, or did not answer; names it and the end of its log.
    """
    num = config.num_engines
    if isinstance(config, OwnEngine):
        return await _all_or_none([_open_own(model_directory, config.only(k), detokenize) for k in range(num)])
    nodes: Sequence[tuple[Node | None, float, Sequence[int]]] | None = None  # of separate processes, with their GPUs
    if config.is_started:
        nodes = await asyncio.to_thread(take_engine_nodes, num)
    if nodes is None and isinstance(config, EngineConfig):
        if not config.is_apart:
            return [await _open_here(model_directory, config, detokenize)]
        check_processes(config)
        nodes = [(None, 0.0, config.only(place).devices) for place in range(num)]
    if logs is None:
        logs = Path(tempfile.mkdtemp(prefix="strop-logs-"))
    called = [(name, logs / f"{name.replace(' ', '-')}.log") for name in names or [f"{config.kind} {k}" for k in range(num)]]
    if nodes is not None:
        places = enumerate(zip(called, nodes, strict=True))
        return await _all_or_none(
            [_open_process(model_directory, config.only(k), name, log, *node) for k, ((name, log), node) in places]
        )
    assert not isinstance(config, EngineConfig)
    model = await asyncio.to_thread(ModelFacts.of, model_directory)
    checksum = await asyncio.to_thread(directory_checksum, model_directory)
    return await _all_or_none(
        [_open_server_engine(model, checksum, config.only(place), *called[place]) for place in range(num)]
    )


async def _open_process(
    path: Path, config: EngineChoice, name: str, log: Path, node: Node | None, gpus: float, devices: Sequence[int]
) -> InferenceEngine:
    from strop.engine.actor import ActorEngine  # imports transformers, which takes seconds

    seen = {"CUDA_VISIBLE_DEVICES": ",".join(map(str, devices))} if devices else {}
    return await ActorEngine.start(path, config, name=name, log=log, environment=seen, node=node, gpus=gpus)


async def _open_here(path: Path, config: EngineConfig, detokenize: Detokenizer | None) -> InferenceEngine:
    from strop.engine.torch.engine import TorchEngine  # imports transformers, which takes seconds

    return await asyncio.to_thread(TorchEngine.from_directory, path, config, detokenize=detokenize)


async def _open_own(path: Path, config: OwnEngine, detokenize: Detokenizer | None) -> InferenceEngine:
    assert detokenize is not None
    with user_code.blaming("when an engine was opened"):
        engine = await config.open(path, detokenize=detokenize)
    if not hasattr(engine, "load_weights"):
        raise user_code.returned(config.open, engine, "Return an InferenceEngine", what=f"engine {config.kind}")
    return engine


async def _open_server_engine(
    model: ModelFacts, checksum: str, config: VllmConfig | SglangConfig, name: str, log: Path
) -> InferenceEngine:
    await asyncio.to_thread(check_interpreter, config)
    kind: type[Server[Any]] = SglangServer if isinstance(config, SglangConfig) else VllmServer
    try:
        if config.addresses:
            server = await kind.connect(config.addresses[0], config)
        else:
            server = await kind.start(name, model, config, log=log)
    except EngineLost as error:
        if config.addresses and isinstance(error.__cause__, httpx2.ConnectError | httpx2.ConnectTimeout):
            raise UserError(
                f"engine.addresses: nothing listens at {config.addresses[0]} ({error.__cause__}). Start a server there, as"
                " docs/engines.md says, or mend the address; with engine.python instead, strop starts one."
            ) from error
        raise
    engine = ServerEngine(server, model, config)
    try:
        await engine.load_weights(Publication.in_files(model.directory, version=0, checksum=checksum))
        await engine.warm_up()
    except BaseException:
        await engine.close()
        raise
    return engine


async def _all_or_none(opening: Sequence[Coroutine[Any, Any, InferenceEngine]]) -> list[InferenceEngine]:
    """Return the opened engines. If one fails or the caller is cancelled, await and close the others."""
    tasks = [asyncio.create_task(each) for each in opening]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, BaseException):
                await result.close()
        raise


def check_processes(config: EngineConfig) -> None:
    """Raises `UserError` if the engine needs separate processes and Ray, which starts them, is not installed."""
    if config.is_apart:
        key = "replicas" if config.replicas > 1 else "own_process" if config.own_process else "devices"
        check_installed(f"engine.{key}", instead=' A server engine, such as engine.kind = "vllm", needs no Ray.')


def check_interpreter(config: VllmConfig | SglangConfig) -> None:
    """Raises `UserError` unless `engine.python`, where it is set, can be run here and finds the server's package."""
    if config.python is None:
        return
    if shutil.which(config.python, path=config.environment.get("PATH")) is not None:
        if _lacks_package(config, config.python):
            raise UserError(f"engine.python: {config.python} has no module {config.kind!r}. {_how_to_get_one(config)}")
        return
    is_bare = os.sep not in str(config.python)  # a word like python3 is looked for as a shell does
    if not config.python.exists():
        fault = "is not on the PATH" if is_bare else "does not exist"
    else:
        fault = "is a directory" if config.python.is_dir() else "is not executable"
    raise UserError(f"engine.python: {config.python} {fault}. {_how_to_get_one(config)}")


def _lacks_package(config: VllmConfig | SglangConfig, python: Path) -> bool:
    """Whether the interpreter does not find the server's package. Nothing of it is imported."""
    find = f"import importlib.util, sys; sys.exit({_LACKS} if importlib.util.find_spec(sys.argv[1]) is None else 0)"
    with contextlib.suppress(subprocess.TimeoutExpired, OSError):  # the server's start will say what is wrong
        words = [str(python), "-c", find, config.kind]
        found = subprocess.run(words, env=environment_of(config, {}), capture_output=True, timeout=_FIND_S, check=False)
        return found.returncode == _LACKS
    return False


def _how_to_get_one(config: VllmConfig | SglangConfig) -> str:
    return (
        f"Name the interpreter of an environment that has {config.kind}: `make test-vllm`, as an example, sets up .venv-vllm"
        " with vLLM, whose interpreter is .venv-vllm/bin/python."
    )
