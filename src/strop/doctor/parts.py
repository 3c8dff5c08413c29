"""The parts under examination, built as a run builds them; each can be replaced by another."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers

from strop.doctor.own_code import call_own_code
from strop.engine.config import EngineChoice
from strop.engine.opening import open_engines
from strop.engine.protocol import InferenceEngine
from strop.errors import ConfigError, MachineError, UserError
from strop.recipe.recipe import Recipe
from strop.recipe.stage import PlayedKeys, Product
from strop.rewards import RunService, make_reward
from strop.rewards.base import Reward
from strop.rollout.chat_template import ChatFormat
from strop.run_directory import LineWriter, RunDirectory
from strop.sandbox.local import open_service
from strop.sandbox.protocol import RunRequest
from strop.sandbox.scripted import ScriptedSandbox
from strop.stages.context import Silent, StageContext, load_chat, open_tasks
from strop.stages.loop.engines import prompt_lengths
from strop.stages.model import ModelStage, find_model
from strop.tools import open_tools
from strop.tools.protocol import Tool
from strop.tools.python import Python
from strop.training.batch import TokenBatch, pack
from strop.training.config import OptimizerConfig, TrainerConfig
from strop.training.models import load_model
from strop.training.trainer import Trainer
from strop.types import Task, derive_seed
from strop.user_code import blaming

ROOM = 512  # tokens that the doctor's own conversation may take behind its prompt
_NUM_TASKS = 32
_NUM_TEXTS = 100  # that a tiny model's tokenizer is trained on; a run takes more
_MAX_SLOTS = 16
# AdamW's first step moves every weight by about this much: log-probs move by far more than rounding, whatever the model.
_PERTURBATION = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What a step of the recipe runs on. The trainer, the engine and `original` hold the same weights at the start."""

    recipe: Recipe
    origin: str  # the stage that the model comes from
    stage: PlayedKeys  # keys of the stage whose prompt, sampling, limits and reward are examined
    trainer_config: TrainerConfig
    model: str  # in words
    chat: ChatFormat
    engine: InferenceEngine
    engine_config: EngineChoice  # of the examined stage
    trainer: Trainer
    original: transformers.PreTrainedModel  # float32, never trained: what engine and trainer are compared with
    tools: tuple[Tool, ...]
    reward: Reward
    pack: Callable[..., TokenBatch]  # `strop.training.batch.pack`
    tasks: tuple[Task, ...]  # the first of the stage's training tasks
    longest_prompt: int  # of these tasks, in tokens
    own_code: str  # what of the user's was called, in words

    @property
    def is_rounded(self) -> bool:
        """Whether engine or trainer computes in bfloat16."""
        return "bfloat16" in (self.engine_config.dtype, self.trainer_config.precision)

    @property
    def temperature(self) -> float:
        """At which tokens are sampled and scored; greedy decoding reports log-probs of temperature 1."""
        return self.stage.sampling.temperature or 1.0


@asynccontextmanager
async def open_parts(
    recipe: Recipe, model: Path | None, progress: Callable[[str], None] = lambda _: None
) -> AsyncIterator[Parts]:
    """Open the real parts for `recipe`. Before the model is loaded, the user's code is called.

    Args:
        model: a model directory to use in place of the model that the recipe starts from.
        progress: called with each thing that is begun.

    Raises:
        UserError: there is no such model, or it cannot be used here; there are no tasks; or the user's code is wrong.
    """
    async with AsyncExitStack() as opened:
        progress("opening sandbox, tools and tasks")
        runner = await _open_sandbox(recipe, opened)
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="strop-doctor-")))
        tools = await opened.enter_async_context(open_tools(recipe.tools, runner))
        tasks = {name: _first_tasks(recipe, name) for name, stage in recipe.stages.items() if stage.plays}
        if not tasks:
            raise ConfigError(f"recipe {recipe.name!r} has no stage that plays tasks, so there is nothing to examine.")
        name = min(tasks, key=lambda each: recipe.stages[each].makes is not Product.MODEL)  # the first that learns, if any
        stage = recipe.stages[name].config
        assert isinstance(stage, PlayedKeys)
        progress("finding the model")
        origin, directory, words = await _find_or_make_model(recipe, model, place)
        chat = load_chat(directory)
        progress("calling your code")
        own_code = await call_own_code(recipe, tasks, chat, tools, runner)
        progress(f"loading {words}")
        trainer_config = getattr(stage, "trainer", TrainerConfig())
        longest = max(prompt_lengths(stage, tasks[name], chat, tools))
        engine_config = recipe.for_stage(name).engine
        config = engine_config.model_copy(
            update={
                "slots": min(engine_config.slots, _MAX_SLOTS),
                "max_length": max(engine_config.max_length, longest + ROOM),  # whether the recipe's is enough is another check
            }
        )
        trainer = Trainer.from_directory(
            directory, trainer_config.model_copy(update={"optimizer": OptimizerConfig(lr=_PERTURBATION), "workers": 0})
        )
        opened.push_async_callback(trainer.close)
        [engine] = await open_engines(directory, config.only(0), detokenize=chat.decode, logs=place)
        opened.push_async_callback(engine.close)
        reward = make_reward(stage.reward, runner)
        opened.push_async_callback(reward.close)
        yield Parts(
            recipe=recipe,
            engine_config=engine_config,
            origin=origin,
            stage=stage,
            trainer_config=trainer_config,
            model=words,
            chat=chat,
            engine=engine,
            trainer=trainer,
            original=load_model(directory).eval(),
            tools=tools,
            reward=reward,
            pack=pack,
            tasks=tasks[name],
            longest_prompt=longest,
            own_code=own_code,
        )


def _first_tasks(recipe: Recipe, name: str) -> tuple[Task, ...]:
    """Return the first training tasks of the stage `name`. Raises `UserError` if there are none."""
    config = recipe.stages[name].config
    assert isinstance(config, PlayedKeys)
    with blaming():
        source = open_tasks(recipe, name, config.tasks, seed=derive_seed("doctor", recipe.seed), split="train")
        num = _NUM_TASKS if source.num_tasks is None else min(_NUM_TASKS, source.num_tasks)
        return tuple(source.task(index) for index in range(num))


def _broken_sandbox(reason: str) -> ScriptedSandbox:
    """In place of a sandbox that could not be started: the tool round trip reports why, and all other checks are made."""

    def refuse(request: RunRequest) -> str:
        raise MachineError(reason)

    return ScriptedSandbox(answer=refuse)


async def _open_sandbox(recipe: Recipe, opened: AsyncExitStack) -> RunService:
    try:
        return await opened.enter_async_context(open_service(recipe.sandbox))
    except (UserError, MachineError) as error:
        broken = _broken_sandbox(str(error))
        opened.push_async_callback(broken.close)
        return broken


async def _find_or_make_model(recipe: Recipe, model: Path | None, place: Path) -> tuple[str, Path, str]:
    """Return the stage that the model comes from, the model's directory, and what to call it. Raises `UserError`."""
    origins = [(name, stage) for name, stage in recipe.stages.items() if isinstance(stage, ModelStage)]
    if not origins:
        raise ConfigError(f"recipe {recipe.name!r} has no stage that names a model.")
    name, origin = origins[0]
    if model is not None:
        return name, find_model(str(model)), str(model)
    tiny = origin.config.tiny
    if tiny is not None:
        origin = origin.replaced(tiny=tiny.model_copy(update={"num_texts": min(tiny.num_texts, _NUM_TEXTS)}))
    scripted = ScriptedSandbox(answer=lambda _: "42\n")  # texts for a tokenizer do not need a sandbox that works
    stateless = {key: each.replaced(stateful=False) if isinstance(each, Python) else each for key, each in recipe.tools.items()}
    async with open_tools(stateless, scripted) as tools:
        with blaming(), closing(LineWriter(place / "events.jsonl")) as events:
            context = StageContext(
                name=name,
                stage=origin,
                recipe=recipe,
                run=RunDirectory(place),
                runner=scripted,
                tools=tools,
                open_engines=open_engines,
                progress=Silent(),
                trackers=(),
                events=events,
            )
            made = await origin.run(context)
    assert made.product is not None
    return name, made.product, made.summary if tiny is None else f"a new model: {made.summary}"
