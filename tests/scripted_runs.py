"""A whole recipe on doubles: what the engine says is scripted by the request's seed, so a run takes seconds and repeats."""

import asyncio
import atexit
import functools
import json
import random
import re
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from faulty_engine import FaultyEngine
from faulty_sandbox import FaultySandbox
from strop.config import validate
from strop.pipeline.run import TrainResult, train
from strop.recipe.recipe import Recipe, resolve
from strop.reports.trackers import Progress
from strop.run_directory import read_json, read_lines
from strop.runs.lineage import num_common
from strop.sandbox.protocol import RunOutcome
from strop.sandbox.scripted import scripted_result
from strop.stages.context import load_chat
from strop.stages.loop.checkpoints import CheckpointWriter

RECIPE = {
    "name": "scripted",
    "threads": 1,
    "tasks": {"kind": "arithmetic", "num_terms": 2, "max_digits": 2, "operators": ["+"], "wording": "{expression}"},
    "prompt": "plain",
    "tools": {"python": {"name": "python"}},
    "engine": {"max_length": 256},
    "limits": {"max_turns": 3, "max_response_tokens": 64},
    "sampling": {"max_tokens": 200},
    "stages": {
        "base": {
            "kind": "model",
            "demonstrator": {"kind": "arithmetic"},
            "tiny": {
                "vocab_size": 320,
                "hidden_size": 16,
                "intermediate_size": 32,
                "num_layers": 1,
                "num_heads": 2,
                "num_texts": 10,
            },
        },
        "sft": {
            "kind": "sft",
            "init": "base",
            "demonstrator": {"kind": "arithmetic", "error_fraction": 0.5},
            "num_demonstrations": 8,
            "steps": 2,
            "batch_size": 4,
            "checkpoint_every": 1,
            "trainer": {"optimizer": {"lr": 1e-2}},
        },
        "before": {"kind": "eval", "init": "sft", "num_tasks": 3, "k": 2},
        "rl": {
            "kind": "rl",
            "init": "sft",
            "method": "grpo",
            "steps": 2,
            "tasks_per_step": 3,
            "group_size": 6,
            "trainer": {"optimizer": {"lr": 1e-2}},
        },
        "after": {"kind": "eval", "init": "rl", "num_tasks": 3, "k": 2},
    },
}


def make_recipe(**rl):
    """The recipe above, with other keys for its RL stage."""
    stages = RECIPE["stages"] | {"rl": RECIPE["stages"]["rl"] | rl}
    return Recipe.model_validate_json(json.dumps(resolve(RECIPE | {"stages": stages})))


def recipe_of(stages, **root):
    """A recipe of these stages, with the shared tables above or others. Raises `ConfigError`."""
    return validate(Recipe, resolve(RECIPE | root | {"stages": stages}), place="test")


def sums_and_errors(request):
    """A sandbox that adds where the program is `print(a+b)`, and says what Python would say of anything else."""
    found = re.fullmatch(r"print\((\d+)\+(\d+)\)", request.code)
    if found is None:
        return scripted_result("NameError: name 'prnt' is not defined\n", RunOutcome.ERROR)
    return f"{int(found[1]) + int(found[2])}\n"


def call(code):
    return "<tool_call>" + json.dumps({"name": "python", "arguments": {"code": code, "input": ""}}) + "</tool_call>"


def answer(value):
    return f"<answer>\\boxed{{{value}}}</answer>"


def sometimes_right(conversation, draw):
    """Calls the tool rightly or wrongly, then answers what it said or a wrong number; some guess at once."""
    expression = re.search(r"\d+\+\d+", conversation)[0]
    outputs = re.findall(r"<tool_response>\n(.*?)\n?\n</tool_response>", conversation, flags=re.DOTALL)
    if not outputs:
        return draw.choice([call(f"print({expression})"), call(f"prnt({expression})"), answer(7)])
    if not outputs[-1].isdigit():
        return draw.choice([call(f"print({expression})"), answer(0)])
    return answer(draw.choice([outputs[-1], outputs[-1], "1"]))


class RecordingEngine(FaultyEngine):
    """Keeps what it answered, and answers after a time that nobody can foresee, so that no two runs have one order."""

    def __init__(self, policy, **options):
        super().__init__(policy, **options)
        self.answers = {}

    async def complete(self, request):
        completion = await super().complete(request)
        await asyncio.sleep(random.SystemRandom().uniform(0, 0.01))
        self.answers[request.id] = (request, completion)
        return completion


@dataclass
class Watching(Progress):
    """Keeps what a user would have been told."""

    warnings: list = field(default_factory=list)
    stages: list = field(default_factory=list)

    def warning(self, text, *, stage=""):
        self.warnings.append(text)

    def stage_finished(self, name, summary):
        self.stages.append((name, summary))


@dataclass(frozen=True)
class ScriptedRun:
    """A finished run, the engines that were opened for it, and who watched."""

    result: TrainResult
    engines: list
    progress: Watching

    @property
    def run(self):
        return self.result.run


def run_recipe(
    directory,
    recipe=None,
    *,
    say=sometimes_right,
    progress=None,
    engine_options=None,
    runner=None,
    make_engine=RecordingEngine,
    is_fresh=False,
    **words,
):
    """Run `recipe` in `directory`; `say` is (conversation as text, draws of the request's seed) -> what the policy says.

    Where the first stages are those of the recipe above, they are copied from a run that made them, unless the run `is_fresh`.
    `words` are further ones for `train`: until, start.
    """
    engines = []
    recipe, progress = recipe or make_recipe(), progress or Watching()
    if not is_fresh and runner is None and not Path(directory).exists() and (num := min(2, num_common(recipe, make_recipe()))):
        shutil.copytree(_begun(num), directory)

    async def open_engines(model, config, *, detokenize, logs, names):
        chat = load_chat(model)

        def policy(request):
            return chat.completion_ids(say(detokenize(request.ids), random.Random(request.seed)))

        opened = [make_engine(policy, **(engine_options or {})) for _ in range(config.num_engines)]
        engines.extend(opened)
        return opened

    result = asyncio.run(
        train(
            recipe,
            directory,
            progress=progress,
            command="strop train scripted.toml",
            runner=runner or FaultySandbox(answer=sums_and_errors, max_latency_s=0.01),
            open_engines=open_engines,
            **words,
        )
    )
    return ScriptedRun(result=result, engines=engines, progress=progress)


@functools.cache
def _begun(num):
    """The directory of a run that made the first `num` stages of the recipe above, which ask no engine."""
    directory = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, directory)
    return run_recipe(Path(directory) / "run", until=list(RECIPE["stages"])[num - 1], is_fresh=True).run.path


class Fallen(BaseException):
    """Ends a run as a kill does: nothing catches it."""


@contextmanager
def falling(stage, *, before=None, after=None):
    """Expect the run to fall before the checkpoint of step `before` of `stage`, or after that of step `after`."""
    save = CheckpointWriter.save

    async def saving(writer, step):
        is_there = writer.context.name == stage
        if is_there and step == before:
            raise Fallen
        await save(writer, step)
        if is_there and step == after:
            await writer.settle()
            raise Fallen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "save", saving)
        try:
            yield
        except Fallen:
            return
    pytest.fail("the run did not come to the checkpoint at which it was to fall")


def lines_of(run, stage="rl"):
    return [line for line in read_lines(run.metrics) if line["stage"] == stage]


def assert_same_training(run, other, stage="rl"):
    """Equal steps, updates, selections and weights, but for what a clock said."""
    for mine, theirs in ((run.metrics, other.metrics), (run.updates, other.updates)):
        assert [untimed(line) for line in read_lines(mine)] == [untimed(line) for line in read_lines(theirs)]
    for line in lines_of(other, stage):
        paths = [each.stage(stage).selection(line["step"]) for each in (run, other)]
        if paths[1].exists():
            assert read_json(paths[0]) == read_json(paths[1])
    for name in ("model.safetensors", "tokenizer.json"):
        files = [each.stage(stage).model / name for each in (run, other)]
        assert files[0].read_bytes() == files[1].read_bytes(), name


def untimed(line):
    """A line of metrics.jsonl, or an evaluation's figures, without what a clock said."""
    return {
        key: value
        for key, value in line.items()
        if not key.startswith(("time/", "scheduler/", "machine/")) and not key.endswith("_per_s") and key != "time_s"
    }
