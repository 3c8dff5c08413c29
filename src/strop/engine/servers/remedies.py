"""What a user can mend of a server that is not there: said with its key of the recipe and the remedy."""

from __future__ import annotations

import os
import re
import shutil

import httpx

from strop.engine.config import SglangConfig, VllmConfig
from strop.errors import EngineLost, UserError

_NO_MODULE = re.compile(r"No module named '((?:vllm|sglang)[\w.]*)'")


def check_interpreter(config: VllmConfig | SglangConfig) -> None:
    """Raises `UserError` unless `engine.python`, where it is set, can be run here. Runs nothing."""
    if config.python is None or shutil.which(config.python, path=config.environment.get("PATH")) is not None:
        return
    is_bare = os.sep not in str(config.python)  # a word like python3 is looked for as a shell does
    if not config.python.exists():
        fault = "is not on the PATH" if is_bare else "does not exist"
    else:
        fault = "is a directory" if config.python.is_dir() else "is not executable"
    raise UserError(f"engine.python: {config.python} {fault}. {_how_to_get_one(config)}")


def not_started(error: EngineLost, config: VllmConfig | SglangConfig) -> EngineLost | UserError:
    """What to raise where a server of ours did not start: a `UserError` where its environment lacks the server."""
    if (missing := _NO_MODULE.search(str(error))) is None:
        return error
    return UserError(f"engine.python: {config.python} has no module {missing[1]!r}. {_how_to_get_one(config)}")


def not_reached(error: EngineLost, address: str) -> EngineLost | UserError:
    """What to raise where a server by address was not reached: a `UserError` where nothing listens there."""
    if not isinstance(error.__cause__, httpx.ConnectError | httpx.ConnectTimeout):
        return error
    return UserError(
        f"engine.addresses: nothing listens at {address} ({error.__cause__}). Start a server there, as docs/engines.md says, or"
        " mend the address; with engine.python instead, strop starts one."
    )


def _how_to_get_one(config: VllmConfig | SglangConfig) -> str:
    wanted = f"Name the interpreter of an environment that has {config.kind}"
    if config.kind == "vllm":
        return f"{wanted}: `make test-vllm`, as an example, sets up .venv-vllm, whose interpreter is .venv-vllm/bin/python."
    return f"{wanted}; how one is made for vLLM, `make test-vllm` shows (.venv-vllm)."
