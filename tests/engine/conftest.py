import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from strop.engine.processes.fork_server import EngineForkServer

from .servers import vllm_servers
from .servers.vllm_servers import VllmHome
from .support import make_model


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """Starts engines in separate processes. Its fork server imports torch once for all tests, in one event loop."""

    runner: asyncio.Runner
    fork_server: EngineForkServer
    folder: Path
    model: Path  # a directory with the tiny llama

    def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(scenario)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    folder = tmp_path_factory.mktemp("engines")
    make_model("llama").save_pretrained(folder / "model")
    with asyncio.Runner() as runner:
        fork_server = runner.run(EngineForkServer.start(log=folder / "fork_server.log"))
        yield Home(runner=runner, fork_server=fork_server, folder=folder, model=folder / "model")
        runner.run(fork_server.close())


@pytest.fixture(scope="session")
def tiny_vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmHome]:
    """A vLLM server of the tiny llama, in float32."""
    folder = tmp_path_factory.mktemp("vllm")
    make_model("llama").save_pretrained(folder / "model")
    with asyncio.Runner() as runner:
        home = vllm_servers.start(runner, folder / "model", folder, vllm_servers.make_config())
        yield home
        runner.run(home.server.close())
