"""Opens the parts of a recipe at a reduced size, and tries them out: conversations, their batch, log-probs from all sides."""

from __future__ import annotations

import asyncio
import copy
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
import transformers
from torch import Tensor

from strop import user_code
from strop.algorithms.losses import Aggregation
from strop.algorithms.method import Column, Decision, Selection
from strop.doctor.finding import Finding, Origin, Piece
from strop.doctor.own_code import call_own_code, played
from strop.engine.config import EngineChoice, EngineConfig
from strop.engine.opening import open_engines
from strop.engine.protocol import CompletionRequest, InferenceEngine
from strop.errors import ConfigError, MachineError, ModelError, UserError
from strop.pipeline.run import train
from strop.recipe.recipe import Recipe
from strop.recipe.stage import PlayedKeys, Product, Stage
from strop.reports.trackers import Progress
from strop.rewards import RunService, make_reward
from strop.rewards.base import Reward
from strop.rollout.chat_template import ChatFormat, message
from strop.rollout.environment import ToolEnvironments, ended
from strop.rollout.prompt import load_prompt
from strop.rollout.tool_calls import Calls
from strop.run_directory import read_json
from strop.sandbox.local import open_service
from strop.sandbox.protocol import RunRequest
from strop.sandbox.scripted import ScriptedSandbox
from strop.stages.context import load_chat, open_tasks, product_of
from strop.stages.loop.engines import prompt_lengths
from strop.stages.model import ModelStage, find_model
from strop.tools import open_tools
from strop.tools.protocol import Tool, ToolKind
from strop.tools.python import Python
from strop.training.batch import Row, TokenBatch, pack, pack_rows
from strop.training.config import OptimizerConfig, TrainerConfig
from strop.training.models import load_model
from strop.training.trainer import Trainer
from strop.types import Completion, FinishReason, Group, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory, derive_seed
from strop.user_code import blaming

CODE, PRINTED = "print(6*7)", "42"
_NUM_CONVERSATIONS = 2
_NUM_PROBES = 16
_PROBE_TOKENS = 24
_ROOM = 512  # tokens that the doctor's own conversation may take behind its prompt
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
    is_rounded: bool  # whether engine or trainer computes in bfloat16

    @property
    def temperature(self) -> float:
        """At which tokens are sampled and scored; greedy decoding reports log-probs of temperature 1."""
        return self.stage.sampling.temperature or 1.0


@asynccontextmanager
async def open_parts(
    recipe: Recipe,
    model: Path | None,
    progress: Callable[[str], None] = lambda _: None,
    fault: Callable[[Finding], None] = lambda _: None,
) -> AsyncIterator[Parts]:
    """Open the real parts for `recipe`. Before the model is loaded, the user's code is called.

    Args:
        model: a model directory to use in place of the model that the recipe starts from.
        progress: called with each thing that is begun.
        fault: called with each tool that cannot be opened, and is left out, and with a server engine that cannot be opened, in
            whose place is the embedded one.

    Raises:
        UserError: there is no such model, or it cannot be used here; there are no tasks; or the user's code is wrong.
    """
    async with AsyncExitStack() as opened:
        progress("opening sandbox, tools and tasks")
        runner = await _open_sandbox(recipe, opened)
        if recipe.threads is not None:
            torch.set_num_threads(recipe.threads)
        place = Path(opened.enter_context(tempfile.TemporaryDirectory(prefix="strop-doctor-")))
        tools: tuple[Tool, ...] = ()
        kinds: dict[str, ToolKind] = {}
        for key, kind in recipe.tools.items():
            try:
                tools += await opened.enter_async_context(open_tools({key: kind}, runner))
                kinds[key] = kind
            except ConfigError:
                raise
            except UserError as error:
                fault(Finding.from_message(f"tools.{key}", str(error)))
        if len(kinds) < len(recipe.tools):
            recipe = recipe.model_copy(update={"tools": kinds, "stages": _with_limits_of(recipe.stages, tools)})
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
                "max_length": max(engine_config.max_length, longest + _ROOM),  # whether the recipe's is enough is another check
            }
        )
        trainer = Trainer.from_directory(
            directory, trainer_config.model_copy(update={"optimizer": OptimizerConfig(lr=_PERTURBATION), "workers": 0})
        )
        opened.push_async_callback(trainer.close)
        try:
            [engine] = await open_engines(directory, config.only(0), detokenize=chat.decode, logs=place)
        except UserError as error:
            if isinstance(config, EngineConfig) or isinstance(error, ModelError):
                raise
            stand_in = EngineConfig(slots=config.slots, max_length=longest + _ROOM, dtype=config.dtype)
            try:
                [engine] = await open_engines(directory, stand_in, detokenize=chat.decode)
            except ModelError:  # which only the server implements
                raise error from None
            fault(Finding.from_message("engine", str(error)))
        opened.push_async_callback(engine.close)
        reward = make_reward(stage.reward, runner)
        opened.push_async_callback(reward.close)
        yield Parts(
            recipe=recipe,
            engine_config=engine_config,
            origin=origin,
            stage=stage,
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
            is_rounded="bfloat16" in (engine_config.dtype, trainer_config.precision),
        )


def _first_tasks(recipe: Recipe, name: str) -> tuple[Task, ...]:
    """Return the first training tasks of the stage `name`. Raises `UserError` if there are none."""
    config = recipe.stages[name].config
    assert isinstance(config, PlayedKeys)
    with blaming():
        source = open_tasks(recipe, name, config.tasks, seed=derive_seed("doctor", recipe.seed), split="train")
        num = _NUM_TASKS if source.num_tasks is None else min(_NUM_TASKS, source.num_tasks)
        return tuple(source.task(index) for index in range(num))


async def _open_sandbox(recipe: Recipe, opened: AsyncExitStack) -> RunService:
    """Open the sandbox. In place of one that cannot start, the tool round trip gets why, and all other checks are made."""
    try:
        return await opened.enter_async_context(open_service(recipe.sandbox))
    except (UserError, MachineError) as error:
        reason = str(error)

    def refuse(request: RunRequest) -> str:
        raise MachineError(reason)

    return ScriptedSandbox(answer=refuse)


def _with_limits_of(stages: Mapping[str, Stage], tools: Sequence[Tool]) -> dict[str, Stage]:
    """`stages` without limits on calls of other tools than `tools`."""
    names, limited = {tool.spec.name for tool in tools}, dict(stages)
    for key, stage in stages.items():
        if isinstance(stage.config, PlayedKeys):
            limits = stage.config.limits
            left = {name: num for name, num in limits.max_calls_per_tool.items() if name in names}
            limited[key] = stage.replaced(limits=limits.model_copy(update={"max_calls_per_tool": left}))
    return limited


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
    # Texts for a tokenizer do not need a sandbox that works.
    tools = {key: each.replaced(stateful=False) if isinstance(each, Python) else each for key, each in recipe.tools.items()}
    only = recipe.model_copy(update={"stages": {name: origin}, "tools": tools, "trackers": (), "cluster": None})
    runner = ScriptedSandbox(answer=lambda _: "42\n")
    with blaming():
        run = (await train(only, place / "model", progress=Progress(), runner=runner)).run
    summary = read_json(run.stage(name).done)["summary"]
    return name, product_of(run, name), summary if tiny is None else f"a new model: {summary}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A rollout in whose first turn a tool call is put into the policy's mouth; all else is sampled or observed."""

    trajectory: Trajectory
    call: str  # as the prompt has calls written; empty where it knows none, or no tool of the recipe runs Python
    tool_fault: str  # why the tool could not run at all; empty when it ran


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """The `n` sampled tokens of some rows, seen from three sides. Log-probs in nats, (n,) each."""

    engine: Tensor  # as reported
    trainer: Tensor  # as scored at the recipe's temperature
    logits: Tensor  # float32 (n, V): of the original weights, in a plain forward of `transformers`, before any temperature
    tokens: Tensor  # int64
    rounding_nats: float  # mean distance of that forward in bfloat16 from itself in float32; 0 where nobody rounds

    @property
    def said(self) -> dict[str, Tensor]:
        return {"engine": self.engine, "trainer": self.trainer}

    def original(self, temperature: float) -> Tensor:
        """Log-probs of the tokens under the original weights."""
        return logprobs_at(self.logits, self.tokens, temperature)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """The parts, and what came of trying them out together. Weights are still the original ones."""

    parts: Parts
    conversations: tuple[Conversation, ...]
    batch: TokenBatch  # of the conversations, as `parts.pack` makes it: one row each, in order
    evidence: Evidence

    @property
    def tolerance_nats(self) -> float:
        """How far two computations of one log-prob may lie apart on average: engine and trainer may each round once."""
        return max(2e-2 if self.parts.is_rounded else 1e-3, 2 * self.evidence.rounding_nats)


async def try_out(parts: Parts) -> Examination:
    """Play, pack, sample, score. Raises `MachineError` when the engine is lost."""
    conversations = tuple([await _converse(parts, index) for index in range(min(_NUM_CONVERSATIONS, len(parts.tasks)))])
    rows = [conversation.trajectory for conversation in conversations]
    rows += await sample_rows(parts, "before", num=_NUM_PROBES)
    return Examination(
        parts=parts, conversations=conversations, batch=_packed(parts, conversations), evidence=await compare(parts, rows)
    )


async def sample_rows(parts: Parts, name: str, *, num: int) -> list[Trajectory]:
    """Completions of short prompts, sampled together: nothing stops them, nothing is forced."""

    async def one(index: int) -> Trajectory:
        task = parts.tasks[index % len(parts.tasks)]
        ids = parts.chat.prompt_ids([message("user", task.question)])
        completion = await _sample(parts, ids, num=_PROBE_TOKENS, name=f"{name}-{index}")
        return played(task, ids, (completion, ended("", (), StopReason.ANSWERED)))

    return list(await asyncio.gather(*(one(index) for index in range(num))))


async def compare(parts: Parts, rows: Sequence[Trajectory]) -> Evidence:
    """The sampled tokens of `rows` as the engine reported them, as the trainer scores them, as the original model has them."""
    batch = batch_of(rows, parts.temperature)
    scored = (await parts.trainer.score(batch, Column.OLD_LOGPROBS)).columns[Column.OLD_LOGPROBS]
    logits = await asyncio.to_thread(lambda: torch.cat([_logits(parts.original, row) for row in rows]))
    mask = batch.loss_mask
    tokens = batch.ids[mask]
    rounding_nats = 0.0
    if parts.is_rounded:
        low = copy.deepcopy(parts.original).to(torch.bfloat16)
        rounded = await asyncio.to_thread(lambda: torch.cat([_logits(low, row) for row in rows]))
        exact, inexact = (logprobs_at(each, tokens, parts.temperature) for each in (logits, rounded))
        rounding_nats = (exact - inexact).abs().mean().item()
    return Evidence(
        engine=batch.sampled_logprobs[mask], trainer=scored[mask], logits=logits, tokens=tokens, rounding_nats=rounding_nats
    )


def batch_of(trajectories: Sequence[Trajectory], temperature: float) -> TokenBatch:
    """`trajectories` in the given order, with advantage 1 on every sampled token."""
    rows = [
        Row(
            ids=each.ids,
            loss_mask=each.loss_mask,
            advantages=torch.ones(len(each.ids)),
            sampled_logprobs=each.sampled_logprobs,
            group=0,
        )
        for each in trajectories
    ]
    return pack_rows(rows, aggregation=Aggregation.TOKEN_MEAN, temperature=temperature)


def logprobs_at(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """(n, V), (n,) -> (n,), in nats."""
    return (logits / temperature).log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)


def origins(trajectory: Trajectory) -> list[Origin]:
    """Where each id of `trajectory` comes from, read off its turns one by one."""
    found = [Origin.PROMPT] * len(trajectory.prompt_ids)
    for turn in trajectory.turns:
        found += [Origin.FORCED if forced else Origin.SAMPLED for forced in turn.completion.is_forced]
        found += [Origin.OBSERVATION] * len(turn.observation_ids)
    return found


def pieces(examination: Examination) -> tuple[Piece, ...]:
    """The first conversation as text, cut where the origin of tokens, or their place in the packed mask, changes."""
    trajectory = examination.conversations[0].trajectory
    tokens = zip(trajectory.ids, origins(trajectory), examination.batch.loss_mask[0].tolist(), strict=False)
    found = []
    for (origin, is_trained), part in groupby(tokens, key=lambda token: token[1:]):
        text = examination.parts.chat.decode([token for token, _, _ in part])
        found.append(Piece(text=text, origin=origin, is_trained=is_trained))
    return tuple(found)


@torch.no_grad()
def _logits(model: transformers.PreTrainedModel, row: Trajectory) -> Tensor:
    """Float32 (number of sampled ids, V): what `model` predicts each sampled id from."""
    logits: Tensor = model(input_ids=torch.tensor([row.ids]), use_cache=False).logits[0, :-1].float()
    return logits[torch.tensor(row.loss_mask)[1:]]


def _packed(parts: Parts, conversations: Sequence[Conversation]) -> TokenBatch:
    selections = []
    for index, conversation in enumerate(conversations):
        scored = ScoredTrajectory(trajectory=conversation.trajectory, reward=1.0, reward_parts={})
        group = Group(task=parts.tasks[index], task_index=index, trajectories=(scored,))
        selections.append(Selection(group=group, decisions=(Decision(is_kept=True, reason="examined", figures={}),)))
    advantages = [[torch.ones(len(each.trajectory.ids))] for each in conversations]
    return parts.pack(selections, advantages, aggregation=Aggregation.TOKEN_MEAN, temperature=parts.temperature)


async def _converse(parts: Parts, index: int) -> Conversation:
    chat, task = parts.chat, parts.tasks[index]
    python = [tool for tool in parts.tools if {"code", "input"} <= tool.spec.parameters.get("properties", {}).keys()][:1]
    limits = parts.stage.limits.model_copy(update={"max_turns": 2, "max_calls": None})
    environments = ToolEnvironments(chat, load_prompt(parts.stage.prompt), python, limits)
    call, fault = "", ""
    if python and environments.prompt.calls is not Calls.NONE:
        call = environments.format.write(python[0].spec.name, {"code": CODE, "input": ""})
    environment = environments(task, seed=index)
    try:
        prompt = (await environment.start()).ids
        name, num = f"conversation-{index}", 8 + 4 * index
        forced = chat.completion_ids(call)[:-1]
        if environments.format.continues_turn:  # sampling stops at the call
            head = await _sample(parts, prompt, num=num, name=f"{name}-first")
            called = _joined(head, forced=forced)
        else:
            tail = await _sample(parts, prompt + forced, num=num, name=f"{name}-first", stop_ids=chat.stop_ids)
            called = _joined(tail, before=forced)
        try:
            observation = await environment.step(called, num_tokens_left=_ROOM)
        except (MachineError, UserError) as error:  # the conversation continues for the other checks
            fault, observation = str(error), ended(chat.decode(called.ids), (), StopReason.ANSWERED)
        context = prompt + called.ids + observation.ids
        answer = await _sample(parts, context, num=16 + 4 * index, name=f"{name}-second", stop_ids=chat.stop_ids)
    finally:
        await environment.close()
    said = (called, observation), (answer, ended(chat.decode(answer.ids), (), StopReason.ANSWERED))
    trajectory = played(task, prompt, *said, key=RolloutKey(task_index=index, attempt=0))
    return Conversation(trajectory=trajectory, call=call, tool_fault=fault)


def _joined(sampled: Completion, *, before: tuple[int, ...] = (), forced: tuple[int, ...] = ()) -> Completion:
    """What was sampled, with ids that were forced on the policy before it, or behind it."""
    return replace(
        sampled,
        ids=before + sampled.ids + forced,
        logprobs=(*[0.0] * len(before), *sampled.logprobs, *[0.0] * len(forced)),
        entropies=(),
        is_forced=(True,) * len(before) + sampled.is_forced + (True,) * len(forced),
        finish_reason=FinishReason.STOP,
    )


async def _sample(
    parts: Parts, ids: tuple[int, ...], *, num: int, name: str, stop_ids: frozenset[int] = frozenset()
) -> Completion:
    seed = derive_seed("doctor", parts.recipe.seed, name)
    request = CompletionRequest(
        id=f"doctor-{name}", ids=ids, max_tokens=num, stop_ids=stop_ids, temperature=parts.temperature, seed=seed
    )
    try:
        completion = await parts.engine.complete(request)
        return user_code.expect(completion, Completion, parts.engine.complete, what="the engine")
    finally:
        await parts.engine.release(request.id)
