"""A whole recipe on doubles: what the engine says is scripted by the request's seed, so a run takes seconds and repeats."""

import asyncio
import json
import random
import re
from dataclasses import dataclass, field

from strop.engine.scripted import ScriptedEngine
from strop.pipeline.run import TrainResult, train
from strop.recipe.recipe import Recipe, resolve
from strop.sandbox.protocol import RunOutcome
from strop.sandbox.scripted import ScriptedSandbox, scripted_result
from strop.stages.context import Silent, load_chat

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


class RecordingEngine(ScriptedEngine):
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
class Watching(Silent):
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
    **words,
):
    """Run `recipe` in `directory`; `say` is (conversation as text, draws of the request's seed) -> what the policy says.

    `words` are further ones for `train`: until, start.
    """
    engines = []
    progress = progress or Watching()

    async def open_engines(model, config, *, detokenize, logs, names):
        chat = load_chat(model)

        def policy(request):
            return chat.completion_ids(say(detokenize(request.ids), random.Random(request.seed)))

        opened = [make_engine(policy, **(engine_options or {})) for _ in range(config.num_engines)]
        engines.extend(opened)
        return opened

    result = asyncio.run(
        train(
            recipe or make_recipe(),
            directory,
            progress=progress,
            command="strop train scripted.toml",
            runner=runner or ScriptedSandbox(answer=sums_and_errors, max_latency_s=0.01),
            open_engines=open_engines,
            **words,
        )
    )
    return ScriptedRun(result=result, engines=engines, progress=progress)


def untimed(line):
    """A line of metrics.jsonl, or an evaluation's figures, without what a clock said."""
    return {
        key: value
        for key, value in line.items()
        if not key.startswith(("time/", "scheduler/", "machine/")) and not key.endswith("_per_s") and key != "time_s"
    }
