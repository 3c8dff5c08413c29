import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from strop.engine.actor import ActorEngine
from strop.engine.config import EngineConfig

from .servers import vllm_servers
from .servers.vllm_servers import VllmHome
from .support import make_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """An event loop, and processes of engines that several tests use one after the other."""

    runner: asyncio.Runner
    folder: Path
    model: Path  # a directory with the tiny llama
    lent: dict[str, ActorEngine] = field(default_factory=dict)

    def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(scenario)

    async def lend(self, name: str, config: EngineConfig) -> ActorEngine:
        """An engine that has published no weights, in a process that an earlier test may have used. Do not close it."""
        before = self.lent.get(name)
        if before is None or not before._actor.is_alive:
            log = self.folder / f"{name}.log"
            before = self.lent[name] = await ActorEngine.start(self.model, config, name=name, log=log)
        described = (before.capabilities, before.capacity, -1)
        lent = self.lent[name] = ActorEngine(name, config, before._actor, before._oom_kills, described)
        return lent


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, one_ray: None) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("engines")
    make_model("llama").save_pretrained(folder / "model")
    with asyncio.Runner() as runner:
        home = Home(runner=runner, folder=folder, model=folder / "model")
        yield home
        for engine in home.lent.values():
            runner.run(engine.close())


@pytest.fixture(scope="session")
def tiny_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHome]:
    """A vLLM server of the tiny llama, in float32."""
    folder = tmp_path_factory.mktemp("vllm")
    make_model("llama").save_pretrained(folder / "model")
    with asyncio.Runner() as runner:
        home = vllm_servers.start(runner, folder / "model", folder, vllm_servers.make_config(max_length=500))
        yield home
        runner.run(home.server.close())
