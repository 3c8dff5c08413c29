"""A mistake in the user's code is one message with function, task, file and line, in the doctor and in a run."""

from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from strop.doctor import examine_file
from strop.stages.model import make_tokenizer

GOOD = '''
import torch
from strop import Environment, Reward, Stage, Task, TaskSource, TextEnvironment, Tool
from strop.algorithms.grpo import GRPO
from strop.recipe.stage import Estimate, Product
from strop.tools import ToolResult, ToolSpec
from strop.types import ToolOutcome

class Source(TaskSource):
    def task(self, index):
        return Task(id=f"own-{index}", question="1+1?", answer="2", source="own")

def reward(task, trajectory):
    return float(len(trajectory.text))

def word_count(text: str) -> int:
    """Count words."""
    return len(text.split())

class Dialogue(TextEnvironment):
    def reset(self, task):
        return "Say a number."
    def step(self, reply):
        return "No.", False

class Ids(Environment):
    async def start(self):
        return None
    async def step(self, completion, *, num_tokens_left):
        return None

class Dice(Tool):
    spec = ToolSpec(name="roll", description="Rolls.", parameters={"type": "object", "properties": {}})
    async def call(self, arguments, *, seed):
        return ToolResult(outcome=ToolOutcome.STDOUT, text="3", duration_s=0.0)

class Ranks(GRPO):
    pass

class Own(Stage):
    makes = Product.MODEL
    async def run(self, context):
        raise ValueError("not to be run by the doctor")
'''
RECIPE = """
name = "own"
threads = 1
prompt = "plain"
sampling = {{ max_tokens = 8 }}
tasks = {tasks}
reward = {reward}
{root}
[engine]
slots = 8
max_length = 256
[stages.base]
kind = "model"
tasks = {{ kind = "arithmetic" }}
prompt = "plain"
demonstrator = {{ kind = "arithmetic" }}
tiny = {{ hidden_size = 32, num_layers = 1, num_heads = 2, intermediate_size = 64, vocab_size = 320, num_texts = 10 }}
[stages.rl]
kind = "rl"
init = "base"
method = {method}
steps = 1
tasks_per_step = 2
group_size = 2
{stages}
"""


OWN = {
    "tasks": '"own_code:Source"',
    "reward": '{ kind = "function", function = "own_code:reward" }',
    "method": '"grpo"',
    "root": "",
    "stages": "",
}


def write(directory: Path, code: str, module: str, **tables: str) -> Path:
    (directory / f"{module}.py").write_text(GOOD + code)
    path = directory / "own.toml"
    path.write_text(RECIPE.format(**OWN | tables).replace("own_code", module))
    return path


SUM = '{ kind = "sum", parts = { own = { kind = "function", function = "own_code:reward" } } }'
ENVIRONMENT = 'environment = "own_code:Dialogue"'
TOOL = 'tools.dice = { kind = "own_code:Dice" }'
FUNCTION = 'tools.w = { kind = "function", function = "own_code:word_count" }'
METHOD = {"method": '"own_code:Ranks"'}
STAGE = '[stages.own]\nkind = "own_code:Own"\n'
BROKEN = [
    # code that replaces what is good, tables, whether a task is named, words of the message
    ("def open(self, **k): raise KeyError('no file')\nSource.open = open", {}, False, "raised KeyError: 'no file'"),
    ("Source.num_tasks = 0", {}, False, "has no tasks"),
    ("def no_task(self, index): return {'id': 'x'}\nSource.task = no_task", {}, False, "returned a dict"),
    ("def no_task(self, index): return 1 / 0\nSource.task = no_task", {}, False, "raised ZeroDivisionError"),
    ("def reward(task, trajectory): return None", {}, True, "returned None"),
    ("def reward(task, trajectory): return float('nan')", {"reward": SUM}, True, "returned nan"),
    ("def reward(task, trajectory): return task.facts['absent']", {"reward": SUM}, True, "'absent'"),
    ("def reward(task, trajectory): return 1 / 0", {"reward": SUM}, True, "raised ZeroDivisionError"),
    ("def reward(trajectory): return 1.0", {"reward": SUM}, False, "cannot be called with (task, trajectory)"),
    ("def reward(prompts, completions, **kwargs): return [1.0]", {}, True, "returned [1.0]"),
    ("def reset(self, task): return None\nDialogue.reset = reset", {"root": ENVIRONMENT}, True, "returned None"),
    ("def step(self, reply): return 'No.'\nDialogue.step = step", {"root": ENVIRONMENT}, True, "Return a text and a bool"),
    ("", {"root": 'environment = "own_code:Ids"'}, True, "Return a Observation"),
    ("async def call(self, arguments, *, seed): return 'six'\nDice.call = call", {"root": TOOL}, True, "Return a ToolResult"),
    ("async def call(self, arguments, *, seed): return 1 / 0\nDice.call = call", {"root": TOOL}, True, "ZeroDivisionError"),
    (
        "def word_count(text: str) -> int:\n    'Count.'\n    return text.absent",
        {"root": FUNCTION},
        True,
        "has no attribute 'absent'",
    ),
    (
        "def select(self, group, **k): return group\nRanks.select = select",
        {"method": '"own_code:Ranks"'},
        True,
        "returned Group",
    ),
    ("def select(self, group, **k): return 1 / 0\nRanks.select = select", {"method": '"own_code:Ranks"'}, True, "ZeroDiv"),
    ("def adv(self, each): return [[torch.ones(2)]]\nRanks.advantages = adv", {"method": '"own_code:Ranks"'}, False, "tensor"),
    ("def loss(self, p, i): return p.sum()\nRanks.token_loss = loss", {"method": '"own_code:Ranks"'}, False, "shape ()"),
    ("def loss(self, p, i): return p / 0\nRanks.token_loss = loss", {"method": '"own_code:Ranks"'}, False, "finite loss"),
    ("def inputs(self): return None\nOwn.inputs = inputs", {"stages": STAGE}, False, "returned None. Return a tuple"),
    ("def check(self, *a): return 1 / 0\nOwn.check = check", {"stages": STAGE}, False, "ZeroDivisionError"),
    ("def plan(self, *a): return {}\nOwn.plan = plan", {"stages": STAGE}, False, "Return a Estimate"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=300, **sizes)).save_pretrained(directory)
    make_tokenizer([], vocab_size=300).save_pretrained(directory)
    return directory


@pytest.mark.parametrize(("code", "tables", "names_task", "words"), BROKEN)
def test_the_doctor_reports_a_mistake_in_the_users_code(
    tmp_path, request, run, service, model, code, tables, names_task, words
):
    module = f"own_code_{abs(hash(request.node.name))}"
    diagnosis = run(examine_file(write(tmp_path, code, module, **tables), [service], model=model))
    [problem] = diagnosis.problems
    shown = f"{problem.detail} {problem.remedy}"
    assert words in shown
    assert f"{module}.py, line " in shown
    assert ("'own-0'" in shown) is names_task


def test_the_doctor_says_which_code_it_called_and_runs_no_stage(tmp_path, run, service, model):
    root = f"{ENVIRONMENT}\n{TOOL}\n{FUNCTION}"
    path = write(tmp_path, "", "own_code_good", reward=SUM, root=root, method='"own_code:Ranks"', stages=STAGE)
    seen = []
    diagnosis = run(examine_file(path, [service], model=model, progress=seen.append))
    assert [problem.detail for problem in diagnosis.problems] == []
    for name in ("Source", "reward", "Dialogue", "Ranks"):
        assert f"own_code_good:{name}" in diagnosis.findings[0].detail
    assert "tool roll, tool word_count" in diagnosis.findings[0].detail
    assert seen.index("calling your code") < seen.index("sampling rollouts") < seen.index("checking: publication")


@pytest.mark.parametrize(
    ("module", "code", "tables", "words"),
    [
        ("own_method", "def select(self, group, **k): return 1 / 0\nRanks.select = select", METHOD, "for task 'own-"),
        ("own_stage", "", {"stages": STAGE}, "raised ValueError: not to be run"),
    ],
)
def test_a_run_ends_with_one_message_and_exit_code_2(strop, tmp_path, module, code, tables, words):
    status, said = strop("train", write(tmp_path, code, module, **tables), "--runs", tmp_path)
    assert status == 2, said
    assert words in said
    assert f"{module}.py, line " in said
