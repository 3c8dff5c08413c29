"""A recipe may name a user's own task source, tool and reward as module:name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from strop import RL
from strop.config import validate
from strop.errors import ConfigError
from strop.pipeline.from_python import recipe_of_keys
from strop.pipeline.plan import plan
from strop.recipe.recipe import Recipe, resolve
from strop.rewards import make_reward
from strop.sandbox import ScriptedSandbox
from strop.tasks import make_tasks
from strop.tools import open_tools, tool
from strop.types import RolloutKey, StopReason, Task, Trajectory

MODULE = '''
from strop import Task, TaskSource

class Squares(TaskSource):
    def task(self, index):
        return Task(id=f"square/{index}", question=f"{index} squared?", answer=str(index**2), source="squares")

def word_count(text: str) -> int:
    """Count the words of a text."""
    return len(text.split())

def shortness(task, trajectory):
    return 1.0 / (1 + trajectory.num_response_tokens)
'''


PLAIN = {"name": "own", "tasks": {"kind": "arithmetic"}, "stages": {"base": {"kind": "model", "path": "model"}}}


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_own_code.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_own_code"


def recipe(module: str, **root: Any) -> Recipe:
    tree = {
        "name": "own",
        "tasks": {"kind": f"{module}:Squares"},
        "reward": {"kind": "function", "function": f"{module}:shortness"},
        "sampling": {"max_tokens": 64},
        "tools": {"word_count": {"kind": "function", "function": f"{module}:word_count"}},
        "stages": {"base": {"kind": "model", "path": "model"}, "check": {"kind": "eval", "init": "base"}},
        **root,
    }
    return validate(Recipe, resolve(tree), place="test")


def test_a_recipe_names_a_users_tasks_tool_and_reward(own_module):
    own = recipe(own_module)
    stage = own.stages["check"].config
    assert make_tasks(stage.tasks, seed=0, split="test").task(3).answer == "9"
    trajectory = Trajectory(
        key=RolloutKey(task_index=0, attempt=0), task_id="t", prompt_ids=(1,), turns=(), stop_reason=StopReason.ANSWERED
    )
    task = Task(id="t", question="", answer="", source="")
    assert asyncio.run(make_reward(stage.reward)(task, trajectory)) == {"reward": 1.0}
    assert stage.reward.weights == {"reward": 1.0}


def test_a_recipe_that_names_tools_has_these_and_no_others(own_module):
    async def call():
        async with open_tools(recipe(own_module).tools, ScriptedSandbox(answer={})) as tools:
            return [(tool.spec.name, (await tool.call({"text": "one two"}, seed=0)).text) for tool in tools]

    assert asyncio.run(call()) == [("word_count", "2")]


def test_a_table_of_tools_is_of_the_kind_that_it_is_called_by_unless_it_says_another():
    tools = {"python": {"name": "calc"}, "search": {"kind": "function", "function": "m:f"}}
    resolved = validate(Recipe, resolve({**PLAIN, "tools": tools}), place="test").tools
    assert [(name, tool.kind, tool.config.name) for name, tool in resolved.items()] == [
        ("python", "python", "calc"),
        ("search", "function", None),
    ]
    with pytest.raises(ConfigError, match=r"tools\.calculator\.kind: required"):
        validate(Recipe, resolve({**PLAIN, "tools": {"calculator": {"name": "calc"}}}), place="test")
    with pytest.raises(ConfigError, match="Did you mean 'wall_s'"):
        validate(Recipe, resolve({**PLAIN, "tools": {"python": {"wall": 1.0}}}), place="test")


@pytest.mark.parametrize(
    ("path", "says"),
    [("no_colon", "not of the form module:name"), ("my_own_code:absent", "no attribute"), ("not_a_module:f", "not_a_module")],
)
def test_code_that_cannot_be_imported_is_named_with_its_key(own_module, path, says):
    stage = recipe(own_module, reward={"kind": "function", "function": path}).stages["check"].config
    with pytest.raises(ConfigError, match=f"reward.function: .*{says}"):
        make_reward(stage.reward)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"reward": {"kind": "function", "function": "my_own_code:no"}}, "reward.function"),
        (
            {"reward": {"kind": "sum", "parts": {"p": {"kind": "function", "function": "my_own_code:no"}}}},
            "reward.parts.p.function",
        ),
        ({"tools": {"word_count": {"kind": "function", "function": "my_own_code:no"}}}, "tools.word_count.function"),
    ],
)
def test_a_dry_run_imports_every_function(own_module: str, table: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: .*my_own_code"):
        plan(recipe(own_module, **table))


def test_a_class_that_lacks_a_method_is_refused_with_its_name(own_module, tmp_path):
    (tmp_path / "half.py").write_text("from strop import Method\n\nclass Half(Method):\n    pass\n")
    rl = {"kind": "rl", "init": "base", "method": "half:Half", "steps": 1}
    with pytest.raises(ConfigError, match=r"method.kind: 'half:Half' has no advantages, no token_loss\. Define it\."):
        recipe(own_module, stages=PLAIN["stages"] | {"rl": rl})


MISTAKES = """
from strop import Reward
from strop.tools import Tool, ToolSpec
from strop.stages.export import Export

class NoScore(Reward):
    def scores(self, task, trajectory):
        return 1.0

class NoConfig(Tool):
    spec = ToolSpec(name="note", description="", parameters={"type": "object"})
    def __init__(self, lines=()):
        self.lines = lines
    async def call(self, arguments, *, seed):
        raise NotImplementedError

class SaysText(Export):
    def check(self, name, recipe, machine):
        yield "something is wrong"
"""


@pytest.fixture
def mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "my_mistakes.py").write_text(MISTAKES)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "my_mistakes"


def test_a_class_that_lacks_what_it_needs_is_refused_with_what_to_add(mistakes):
    with pytest.raises(ConfigError, match=r"reward.kind: 'my_mistakes:NoScore' has no score\. Define it"):
        recipe(mistakes, tasks={"kind": "arithmetic"}, reward={"kind": f"{mistakes}:NoScore"}, tools={})
    with pytest.raises(ConfigError, match=r"tools.note.kind: my_mistakes:NoConfig: its __init__ does not call super"):
        recipe(mistakes, tasks={"kind": "arithmetic"}, reward="math", tools={"note": {"kind": f"{mistakes}:NoConfig"}})


def test_a_function_where_a_class_belongs_is_refused_with_how_to_name_it(own_module):
    with pytest.raises(ConfigError, match=r'named as \{ kind = "function", function = "my_own_code:shortness" \}'):
        recipe(own_module, reward=f"{own_module}:shortness")


def test_a_check_that_yields_a_text_is_the_users_mistake(mistakes):
    base = {"kind": "model", "path": "model"}
    stages = {"base": base, "own": {"kind": f"{mistakes}:SaysText", "init": "base"}}
    with pytest.raises(ConfigError, match=r"SaysText.check .*line \d+.* returned 'something is wrong'\. Yield"):
        plan(validate(Recipe, {"name": "own", "stages": stages}, place="test"))


def shortest(task: Task, trajectory: Trajectory) -> float:
    return -trajectory.num_response_tokens


@tool
def backwards(text: str) -> str:
    """Turns a text around."""
    return text[::-1]


RL_KEYS: dict[str, Any] = {"tasks": "arithmetic", "method": "grpo", "steps": 1, "tasks_per_step": 1, "group_size": 2}


def test_functions_are_rewards_and_tools_in_python():
    found = recipe_of_keys(
        {"name": "a", "model": "m", "tools": {"turn": backwards}, "stages": [RL(**RL_KEYS, reward=shortest)]}
    )
    assert found.stages["rl"].config.reward.config.function == f"{__name__}:shortest"
    assert found.tools["turn"].config.function == f"{__name__}:backwards"


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: RL(**RL_KEYS, stepz=3), r"RL: stepz: unknown key\. Did you mean 'steps'"),
        (
            lambda: recipe_of_keys({"name": "a", "nme": "a", "stages": [RL(**RL_KEYS)], "model": "m"}),
            r"train\(\): nme: unknown key",
        ),
        (lambda: RL(**RL_KEYS, reward={"kind": "sum", "parts": {"a": "mth"}}), r"RL: reward.parts.a.kind: 'mth' is not one of"),
    ],
    ids=["stage", "root", "nested"],
)
def test_mistakes_in_python_are_named_as_in_a_recipe(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_stages_as_tables_read_the_shared_tables_in_python_too():
    keys = {key: value for key, value in RL_KEYS.items() if key != "tasks"}
    rl = {"kind": "rl", "init": "model", **keys}
    found = recipe_of_keys({"name": "a", "model": "m", "tasks": {"kind": "arithmetic", "num_terms": 2}, "stages": {"rl": rl}})
    assert found.stages["rl"].config.tasks.config.num_terms == 2
