"""strop: train language models to reason with tools by reinforcement learning.

The public face. Nothing is imported before it is used, so `import strop` is fast and loads no torch.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# libgomp reads this when torch is loaded. By default a thread spins for milliseconds at the end of each parallel operation. If
# another process has the core of the thread that it waits for, the spinning thread keeps the last free core busy for nothing:
# one busy process on two cores made a step of the demo three times as long. A short spin and then sleep changes no result.
# Where nothing else runs, 3000 makes decode steps of SmolLM2-135M 1.4 times as fast (docs/results.md).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "300")

# glibc gives threads heaps of their own, and what one has freed no other can use: a float32 step of SmolLM2-135M, trainer and
# engine in one process, took 5073 MiB instead of 4400. Threads that run already keep their heaps.
_M_ARENA_MAX = -8  # of glibc's malloc.h
if "MALLOC_ARENA_MAX" not in os.environ and sys.platform == "linux":
    getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(_M_ARENA_MAX, 1)

if TYPE_CHECKING:
    from strop.algorithms.method import Method as Method
    from strop.engine.config import OwnEngine as Engine
    from strop.errors import ConfigError as ConfigError
    from strop.pipeline.from_python import train as train
    from strop.recipe.load import load_recipe as load_recipe
    from strop.recipe.recipe import Recipe as Recipe
    from strop.recipe.stage import Stage as Stage
    from strop.rewards.base import Reward as Reward
    from strop.rollout.own_environment import OwnEnvironment as Environment
    from strop.rollout.own_environment import TextEnvironment as TextEnvironment
    from strop.sandbox import Sandbox as Sandbox
    from strop.stages.evaluation import Eval as Eval
    from strop.stages.rl import RL as RL
    from strop.stages.sft import SFT as SFT
    from strop.tasks.protocol import TaskSource as TaskSource
    from strop.tools.function import tool as tool
    from strop.tools.protocol import Tool as Tool
    from strop.types import Group as Group
    from strop.types import Task as Task
    from strop.types import Trajectory as Trajectory
    from strop.types import Turn as Turn

__all__ = [  # read by tools that do not run this
    "RL",
    "SFT",
    "ConfigError",
    "Engine",
    "Environment",
    "Eval",
    "Group",
    "Method",
    "Recipe",
    "Reward",
    "Sandbox",
    "Stage",
    "Task",
    "TaskSource",
    "TextEnvironment",
    "Tool",
    "Trajectory",
    "Turn",
    "load_recipe",
    "tool",
    "train",
]

_MODULES = {
    "ConfigError": "strop.errors",
    "Engine": "strop.engine.config:OwnEngine",
    "Environment": "strop.rollout.own_environment:OwnEnvironment",
    "Eval": "strop.stages.evaluation",
    "Group": "strop.types",
    "Method": "strop.algorithms.method",
    "RL": "strop.stages.rl",
    "Recipe": "strop.recipe.recipe",
    "Reward": "strop.rewards.base",
    "SFT": "strop.stages.sft",
    "Sandbox": "strop.sandbox",
    "Stage": "strop.recipe.stage",
    "Task": "strop.types",
    "TaskSource": "strop.tasks.protocol",
    "TextEnvironment": "strop.rollout.own_environment",
    "Tool": "strop.tools.protocol",
    "Trajectory": "strop.types",
    "Turn": "strop.types",
    "load_recipe": "strop.recipe.load",
    "tool": "strop.tools.function",
    "train": "strop.pipeline.from_python",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'strop' has no attribute {name!r}")
    module, _, attribute = _MODULES[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
