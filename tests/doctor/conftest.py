"""The recipe of the demo in small, and the one way in which every test examines it."""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from strop.doctor import examine_parts
from strop.doctor.examination import Parts, open_parts
from strop.doctor.finding import Diagnosis
from strop.recipe.load import load_recipe
from strop.recipe.recipe import Recipe
from strop.stages.model import make_tokenizer

RECIPE = """
name = "small"
threads = 1

[tasks]
kind = "arithmetic"
wording = "{expression}"

[reward]
verify_deadline_s = 60.0  # and wall_s below: on a busy machine milliseconds take seconds, and no test here is of a deadline

[tools.python]
name = "python"
wall_s = 60.0

[engine]
slots = 16
max_length = 512
dtype = "float32"

[sampling]
max_tokens = 128
temperature = 0.8

[stages.base]
kind = "model"
prompt = "plain"
demonstrator = { kind = "arithmetic" }
tiny = { hidden_size = 32, num_layers = 2, num_heads = 4, intermediate_size = 64, vocab_size = 320, num_texts = 20 }

[stages.rl]
kind = "rl"
init = "base"
prompt = "plain"
method = "grpo"
steps = 1
tasks_per_step = 4
group_size = 4
updates_per_step = 2
"""

Fault = Callable[[Parts], Parts]


@pytest.fixture(scope="session")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("recipes") / "small.toml"
    path.write_text(RECIPE)
    return path


@pytest.fixture(scope="session")
def service() -> Iterator[str]:
    """The setting for one code service that all examinations share: a sandbox of its own costs each seconds to start."""
    command = [sys.executable, "-m", "strop.cli", "sandbox", "serve", "--port", "0", "--warm", "bare,verify"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            [url] = re.findall(r"http://[\d.:]+", process.stdout.readline())
            yield f"sandbox.url={url}"
        finally:
            process.send_signal(signal.SIGTERM)


@pytest.fixture
def load(recipe_path: Path, service: str) -> Callable[..., Recipe]:
    """The recipe with other settings, on the service that is there."""
    return lambda *overrides: load_recipe(recipe_path, [service, *overrides])


@pytest.fixture
def recipe(load: Callable[..., Recipe]) -> Recipe:
    return load()


@pytest.fixture
def examine_with(recipe: Recipe) -> Callable[..., Diagnosis]:
    """Examine the real parts after `fault` has replaced one of them."""

    def examine(fault: Fault = lambda parts: parts, *, of: Recipe = recipe, model: Path | None = None) -> Diagnosis:
        async def all_of_it() -> Diagnosis:
            async with open_parts(of, model) as parts:
                return await examine_parts(fault(parts))

        return asyncio.run(all_of_it())

    return examine


@pytest.fixture
def tiny_directory(recipe: Recipe, tmp_path: Path) -> Callable[..., Path]:
    """A random model of any architecture in a directory, with the tokenizer of the demo."""

    def make(model: Any) -> Path:
        model.save_pretrained(tmp_path)
        make_tokenizer([], vocab_size=300).save_pretrained(tmp_path)
        return tmp_path

    return make


@pytest.fixture
def run() -> Callable[..., Any]:
    return asyncio.run
