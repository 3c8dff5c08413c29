"""vLLM servers for tests: started once, and lent to one engine after the other."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from strop.engine.config import VllmConfig
from strop.engine.model_directory import ModelFacts
from strop.engine.servers.engine import ServerEngine
from strop.engine.servers.vllm import VllmServer

PYTHON = Path(os.environ.get("STROP_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()


def make_config(**changes: Any) -> VllmConfig:
    settings = {"slots": 3, "max_length": 100, "eager": True, "start_timeout_s": 240.0, "stall_timeout_s": 60.0} | changes
    return VllmConfig(python=PYTHON, **settings)


class Lent:
    """A server that outlives its engines."""

    def __init__(self, server: VllmServer) -> None:
        self._server = server

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    async def close(self) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmHome:
    """A server without weights and the event loop that it lives in."""

    runner: asyncio.Runner
    server: VllmServer
    model: ModelFacts
    config: VllmConfig

    def run(self, scenario: Coroutine[Any, Any, Any]) -> Any:
        return self.runner.run(scenario)

    def engine(self) -> ServerEngine:
        return ServerEngine(Lent(self.server), self.model, self.config)  # type: ignore[arg-type]


def start(runner: asyncio.Runner, model: Path, folder: Path, config: VllmConfig) -> VllmHome:
    facts = ModelFacts.of(model)
    server = runner.run(VllmServer.start("vllm under test", facts, config, log=folder / "vllm.log"))
    return VllmHome(runner=runner, server=server, model=facts, config=config)
