"""A vLLM server of a model directory on this machine, with vLLM's own HTTP front."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from strop.engine.servers.process import ServerProcess
from strop.engine.servers.vllm import shared_memory_of

PYTHON = Path(os.environ.get("STROP_VLLM_PYTHON", ".venv-vllm/bin/python")).absolute()
_FINISHED = re.compile(r"^vllm:request_success_total\{[^}]*finished_reason=\"(?:stop|length)\"[^}]*\} (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmService:
    """One that is up."""

    address: str
    _server: ServerProcess
    _shared: Sequence[Path]

    def num_requests(self) -> int:
        """That it has answered, as it counts them itself; none that its asker left."""
        return sum(int(float(number)) for number in _FINISHED.findall(httpx2.get(f"{self.address}/metrics").text))

    async def close(self) -> None:
        await self._server.stop()
        for path in self._shared:  # its processes do not get to it when they are killed
            path.unlink(missing_ok=True)


async def start_vllm(directory: Path, folder: Path, options: Mapping[str, Any]) -> VllmService:
    """Serves the model in `directory`, and logs into `folder`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    # Not `vllm serve`: that fails in the CPU build, which looks for the version of a package called vllm.
    words = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    options = {"--model": directory, "--host": "127.0.0.1", "--port": port, **options}
    words += [word for option in options.items() for word in option]

    async def is_up() -> bool:
        try:
            async with httpx2.AsyncClient() as client:
                return (await client.get(f"{address}/health", timeout=5)).is_success
        except httpx2.HTTPError:
            return False

    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment |= {"VLLM_NO_USAGE_STATS": "1", "TORCHDYNAMO_DISABLE": "1"}
    argv = [str(word) for word in words]
    server = await ServerProcess.start(argv, env=environment, log=folder / "vllm.log", is_ready=is_up, deadline_s=500)
    return VllmService(address=address, _server=server, _shared=shared_memory_of(server.pid))
