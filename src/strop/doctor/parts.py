"""The parts under examination, built as a run would build them; any one of them can be replaced by another."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from strop.algorithms.aggregation import Aggregation
from strop.algorithms.protocol import Selection
from strop.engine.opening import open_engines
from strop.engine.protocol import InferenceEngine
from strop.errors import ConfigError, MachineError, UserError
from strop.pipelines.model_stage import find_model, run_model_stage
from strop.pipelines.recipe import EvalStage, ExpertIterationStage, ModelStage, Recipe, RlStage, Stage
from strop.pipelines.room import prompt_lengths
from strop.pipelines.stage import StageContext, load_chat
from strop.pipelines.stage_tasks import open_tasks
from strop.reports.progress import Silent
from strop.rewards import RunService, make_reward
from strop.rollout.chat import ChatFormat
from strop.rollout.play import Judge
from strop.runs import LineWriter, RunDirectory
from strop.sandbox.opening import open_service
from strop.sandbox.protocol import PairVerdict, RunRequest, RunResult, VerifyRequest
from strop.sandbox.scripted import ScriptedSandbox
from strop.sandbox.verify_process import ProcessVerifier
from strop.seeds import derive_seed
from strop.tools.protocol import Tool
from strop.tools.python import PythonTool, PythonToolConfig
from strop.tools.toolbox import open_tools
from strop.training.batch import TokenBatch, pack
from strop.training.config import OptimizerConfig
from strop.training.models import load_model
from strop.training.protocol import Trainer
from strop.training.trainer import LocalTrainer
from strop.types import Task

ROOM = 512  # tokens that the doctor's own conversation may take behind its prompt
_NUM_TASKS = 32
_NUM_TEXTS = 100  # that a tiny model's tokenizer is trained on; a run takes more
_MAX_SLOTS = 16
# AdamW's first step moves every weight by about this much: log-probs move by far more than rounding, whatever the model.
_PERTURBATION = 1e-3


class Packer(Protocol):
    """The signature of `strop.training.pack`."""

    def __call__(
        self,
        selections: Sequence[Selection],
        advantages: Sequence[Sequence[Tensor]],
        *,
        aggregation: Aggregation,
        temperature: float,
    ) -> TokenBatch: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step of the recipe runs on. The trainer, the engine and `original` hold the same weights at the start."""

    recipe: Recipe
    stage: Stage  # the one whose prompt, sampling, limits and reward are examined
    model: str  # in words
    chat: ChatFormat
    engine: InferenceEngine
    trainer: Trainer
    original: PreTrainedModel  # float32: the yardstick, never trained
    tools: tuple[Tool, ...]
    judge: Judge
    pack: Packer
    tasks: tuple[Task, ...]  # the first of the stage's training tasks

    @property
    def is_rounded(self) -> bool:
        """Whether engine or trainer computes in bfloat16."""
        return "bfloat16" in (self.recipe.engine.dtype, self.stage.trainer.precision)

    @property
    def tolerance(self) -> float:
        """Nats between two computations of one log-prob that are no reason to ask why."""
        return 2e-2 if self.is_rounded else 1e-3

    @property
    def temperature(self) -> float:
        """At which tokens are sampled and scored; greedy decoding reports log-probs of temperature 1."""
        return self.stage.sampling.temperature or 1.0


@asynccontextmanager
async def open_parts(recipe: Recipe, model: Path | None) -> AsyncIterator[Parts]:
    """The real parts for `recipe`, closed on the way out; `model` stands in for the model that it starts from.

    Raises:
        UserError: there is no such model, or it cannot be used here; or there are no tasks.
    """
    async with AsyncExitStack() as opened:
        runner = await _open_sandbox(recipe, opened)
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="strop-doctor-")))
        tools = await opened.enter_async_context(open_tools(recipe.tools, runner))
        directory, words = await _find_or_make_model(recipe, model, place, tools)
        name = stage_under_examination(recipe)
        stage = recipe.stages[name]
        chat = load_chat(directory)
        tasks = first_tasks(recipe, name)
        longest = max(prompt_lengths(stage, tasks, chat, tools))
        config = recipe.engine.model_copy(
            update={
                "slots": min(recipe.engine.slots, _MAX_SLOTS),
                "max_length": max(recipe.engine.max_length, longest + ROOM),  # whether the recipe's is enough is checked apart
            }
        )
        trainer = LocalTrainer.from_directory(
            directory, stage.trainer.model_copy(update={"optimizer": OptimizerConfig(lr=_PERTURBATION), "workers": 0})
        )
        opened.push_async_callback(trainer.close)
        [engine] = await open_engines(directory, config.only(0), detokenize=chat.decode, logs=place)
        opened.push_async_callback(engine.close)
        reward = make_reward(stage.reward, runner)
        opened.push_async_callback(reward.close)
        yield Parts(
            recipe=recipe,
            stage=stage,
            model=words,
            chat=chat,
            engine=engine,
            trainer=trainer,
            original=load_model(directory).eval(),
            tools=tools,
            judge=Judge(reward=reward, weights=stage.reward.weights),
            pack=pack,
            tasks=tasks,
        )


def stage_under_examination(recipe: Recipe) -> str:
    """Names the first stage that learns from its own rollouts; where none does, the first that evaluates, else the last."""
    for kind in ((RlStage, ExpertIterationStage), EvalStage):
        for name, stage in recipe.stages.items():
            if isinstance(stage, kind):
                return name
    return list(recipe.stages)[-1]


def first_tasks(recipe: Recipe, name: str) -> tuple[Task, ...]:
    """The first training tasks of the stage `name`. Raises `TaskError` when there are none."""
    source = open_tasks(recipe, name, recipe.stages[name].tasks, seed=derive_seed("doctor", recipe.seed), split="train")
    num = _NUM_TASKS if source.num_tasks is None else min(_NUM_TASKS, source.num_tasks)
    return tuple(source.task(index) for index in range(num))


class BrokenSandbox(RunService):
    """Stands in for a sandbox that could not be started: the tool round trip reports why, and all other checks are made."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self._verifier = ProcessVerifier()

    async def run(self, request: RunRequest) -> RunResult:
        raise MachineError(self._reason)

    def verify(self, request: VerifyRequest) -> AsyncIterator[tuple[int, PairVerdict]]:
        return self._verifier.verify(request)

    async def close(self) -> None:
        await self._verifier.close()


async def _open_sandbox(recipe: Recipe, opened: AsyncExitStack) -> RunService:
    try:
        return await opened.enter_async_context(open_service(recipe.sandbox))
    except (UserError, MachineError) as error:
        broken = BrokenSandbox(str(error))
        opened.push_async_callback(broken.close)
        return broken


async def _find_or_make_model(recipe: Recipe, model: Path | None, place: Path, tools: Sequence[Tool]) -> tuple[Path, str]:
    """The model directory and how to call it. Raises `UserError`."""
    if model is not None:
        return find_model(str(model)), str(model)
    origins = [(name, stage) for name, stage in recipe.stages.items() if isinstance(stage, ModelStage)]
    if not origins:
        raise ConfigError(f"recipe {recipe.name!r} has no stage that names a model. Give one with --model.")
    name, origin = origins[0]
    if origin.tiny is not None:
        few = origin.tiny.model_copy(update={"num_texts": min(origin.tiny.num_texts, _NUM_TEXTS)})
        origin = origin.model_copy(update={"tiny": few})
    scripted = ScriptedSandbox(answer=lambda _: "42\n")  # texts for a tokenizer do not need a sandbox that works
    configs = [each for each in recipe.tools.values() if isinstance(each, PythonToolConfig)]
    python = [each.model_copy(update={"stateful": False}) for each in configs]
    with closing(LineWriter(place / "events.jsonl")) as events:
        context = StageContext(
            name=name,
            recipe=recipe,
            run=RunDirectory(place),
            runner=scripted,
            toolbox=[PythonTool(scripted, each) for each in python] or tools,
            open_engines=open_engines,
            progress=Silent(),
            trackers=(),
            events=events,
        )
        directory, words = await run_model_stage(context, origin)
    return directory, words if origin.tiny is None else f"a new model: {words}"
