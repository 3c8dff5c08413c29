"""The presets of recipes/eval: each loads, asks what the paper asks, and judges real rows as it says."""

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from rewards.scorers.chat_service import said, serving
from rewards.trajectories import TASK, trajectory
from scripted_runs import RecordingEngine, make_recipe, run_recipe
from strop.cs336 import load_prompt
from strop.pipeline.run import train
from strop.recipe.load import load_recipe
from strop.reports.trackers import Progress
from strop.rewards import make_reward
from strop.sandbox import LocalSandbox
from strop.stages.context import load_chat, open_tasks
from strop.stages.evaluation import Eval

PRESETS = sorted((Path(__file__).parents[2] / "recipes" / "eval").glob("*.toml"))
ON_OTHER_TERMS = ("arpo", "cs336-supplement", "r1", "rstar2-harness")
DATA = Path(os.environ.get("STROP_DATA", Path(__file__).parents[2].parent / "shared" / "data"))


def _benchmark_of(stage: Eval.Config) -> str:
    return stage.tasks.benchmark(stage.split)


def evaluations(path, *overrides):
    recipe = load_recipe(path, overrides)
    return recipe, {name: stage.config for name, stage in recipe.stages.items() if isinstance(stage, Eval)}


def preset(name):
    [path] = [path for path in PRESETS if path.stem == name]
    return path


def test_the_issues_benchmarks_are_there():
    names = [name for path in PRESETS if path.stem not in ON_OTHER_TERMS for name in evaluations(path)[1]]
    assert sorted(names) == sorted(
        ["aime24", "aime25", "hmmt25", "amc23", "math500", "gsm8k", "hotpotqa", "2wiki", "musique", "bamboogle", "gpqa-diamond"]
    )


def test_arpos_benchmarks_are_played_on_the_terms_of_its_released_scripts():
    _, stages = evaluations(preset("arpo"))
    names = ["gaia", "hle", "webwalker", "xbench", "simpleqa", "2wiki", "musique", "hotpotqa", "bamboogle"]
    assert list(stages) == names
    for stage in stages.values():
        sampling, judge = stage.sampling, stage.reward.config.parts["accuracy"].config.judge
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.6, 0.95, 20)
        assert (sampling.min_p, sampling.repetition_penalty, stage.k) == (0.0, 1.1, 5)
        assert judge.service.model == "Qwen2.5-72B-Instruct"
        assert (stage.limits.max_calls_per_tool, stage.limits.max_calls) == ({"search": 10, "python": 5}, None)


def test_programs_of_livecodebench_find_what_its_runner_imports():
    _, stages = evaluations(preset("r1"))
    code = "```python\ndef depth(n):\n    return n and 1 + depth(n - 1)\n\nprint(depth(5000), gcd(4, 6), Counter()[0])\n```"
    task = replace(TASK, answer=json.dumps([{"input": "", "output": "5000 2 0"}]))

    async def parts():
        async with LocalSandbox() as sandbox:
            return dict(await make_reward(stages["livecodebench"].reward, sandbox)(task, trajectory(code)))

    assert asyncio.run(parts())["accuracy"] == 1.0


@pytest.mark.skipif(not (DATA / "arpo_eval").exists(), reason="needs the real samples")
@pytest.mark.parametrize("stage", ["gaia", "webwalker", "xbench", "simpleqa", "2wiki", "musique"])
def test_the_real_rows_of_arpos_benchmarks_are_read_and_answered(stage):
    rows = DATA / "arpo_eval" / ("gaia_first40.jsonl" if stage == "gaia" else f"{stage}.jsonl")
    where = [f"stages.{stage}.tasks.{key}={rows}" for key in ("path", "test_path")]
    recipe, stages = evaluations(preset("arpo"), *where)
    tasks = open_tasks(recipe, stage, stages[stage].tasks, seed=0, split="test")
    assert tasks.num_tasks == len(rows.read_text().splitlines())
    for number in {*range(min(50, tasks.num_tasks)), *range(max(0, tasks.num_tasks - 50), tasks.num_tasks)}:
        task = tasks.task(number)
        assert task.question.strip()
        assert all(each.strip() for each in json.loads(task.facts["references"]))


@pytest.mark.parametrize("path", [path for path in PRESETS if path.stem not in ON_OTHER_TERMS], ids=lambda path: path.stem)
def test_every_preset_asks_on_the_papers_terms(path):
    recipe, stages = evaluations(path)
    for stage in stages.values():
        assert (stage.sampling.max_tokens, stage.sampling.temperature) == (30 * 1024, 0.6)
        assert (stage.limits.max_turns, stage.k) == (30, 16)
        assert recipe.engine.max_length > stage.sampling.max_tokens


def test_tables_1_and_5_have_the_benchmarks_of_each_row():
    recipe, _ = evaluations(preset("rstar2-harness"))
    rows = {"base": set(), "sft": set(), "rl": set()}
    for stage in recipe.stages.values():
        if stage.init:
            rows[stage.init].add(getattr(stage.config, "benchmark", None) or _benchmark_of(stage.config))
    general = {"BFCL v3", "IFEval", "Arena-Hard"}
    assert rows["base"] == {"math500"} | general
    assert rows["sft"] == {"math500", "aime24", "aime25", "gpqa-diamond"} | general
    assert rows["rl"] == {"gpqa-diamond"} | general


def test_benchmarks_are_called_by_their_data_set_or_where_many_share_one_by_the_subset():
    _, math = evaluations(preset("math"))
    assert _benchmark_of(math["aime24"]) == "aime24"
    _, qa = evaluations(preset("qa"))
    assert _benchmark_of(qa["2wiki"]) == "2wikimultihopqa"


@pytest.mark.parametrize("form", ["arpo-eval", "flashrag", "strop"])
def test_files_in_the_form_of_many_benchmarks_are_called_by_their_place(form):
    """Else the leaderboard ranks HotpotQA and Bamboogle against each other, as "arpo-eval"."""
    stages = ("hotpotqa", "bamboogle")
    files = (f'stages.{each}.tasks={{kind="jsonl", path="{each}/test.jsonl", dataset="{form}"}}' for each in stages)
    _, found = evaluations(preset("qa"), *files)
    assert [_benchmark_of(found[each]) for each in stages] == ["hotpotqa/test", "bamboogle/test"]
    kept = 'stages.hotpotqa.tasks={kind="parquet", path="a/train.parquet", test_path="b/kept.parquet", dataset="arpo-mix"}'
    assert _benchmark_of(evaluations(preset("qa"), kept)[1]["hotpotqa"]) == "b/kept"
    aime = 'stages.aime24.tasks={kind="jsonl", path="files/rows.jsonl", dataset="aime24"}'
    assert _benchmark_of(evaluations(preset("math"), aime)[1]["aime24"]) == "aime24"  # one data set, wherever it lies


def test_files_take_the_place_of_the_hub(tmp_path):
    rows = tmp_path / "hotpotqa.jsonl"
    rows.write_text(json.dumps({"question": "Who?", "answer": ["Frank Lowy", "Lowy"]}) + "\n")
    where = f'stages.hotpotqa.tasks={{kind="jsonl", path="{rows}", test_path="{rows}", dataset="arpo-eval"}}'
    recipe, stages = evaluations(preset("qa"), where)
    task = open_tasks(recipe, "hotpotqa", stages["hotpotqa"].tasks, seed=0, split="test").task(0)
    assert (task.answer, json.loads(task.facts["references"])) == ("Frank Lowy", ["Frank Lowy", "Lowy"])


@pytest.mark.skipif(not (DATA / "aime24" / "test.jsonl").exists(), reason="needs the real samples")
def test_real_aime_is_read_from_a_file():
    rows = DATA / "aime24" / "test.jsonl"
    where = f'stages.aime24.tasks={{kind="jsonl", path="{rows}", test_path="{rows}", dataset="aime24"}}'
    recipe, stages = evaluations(preset("math"), where)
    tasks = open_tasks(recipe, "aime24", stages["aime24"].tasks, seed=0, split="test")
    assert tasks.num_tasks == 30
    assert all(tasks.task(number).answer.isdigit() for number in range(30))


CHOICES = ["Religious differences", "A national holiday", "An attack", "A leader"]
BENCHMARKS = {  # of CS336's supplement: two rows, what is asked of the first, and what is said, wrongly and without an answer
    "mmlu": (
        [{"question": f"Q{n}?", "subject": "high_school_geography", "choices": CHOICES, "answer": n} for n in (0, 3)],
        "Answer the following multiple choice question about high school geography. Respond with a single sentence of the"
        ' form "The correct answer is _", filling the blank with the letter corresponding to the correct answer (i.e., A, B, C'
        " or D).\nQuestion: Q0?\nA. Religious differences\nB. A national holiday\nC. An attack\nD. A leader\nAnswer:",
        {"Q0?": "The correct answer is A.\n```\n\n# Query:", "Q3?": "I do not know."},
    ),
    "gsm8k": (
        [{"question": f"Q{n}?", "answer": f"So.\n#### {n},000"} for n in (1, 2)],
        "Q1?\nAnswer:",
        {"Q1?": "First 7, then 1,000.0 clips.", "Q2?": "Some."},
    ),
    "alpaca_eval": (
        [{"instruction": f"Q{n}?", "output": "Reference.", "dataset": "helpful_base"} for n in (1, 2)],
        "Q1?",
        {"Q1?": "Better.", "Q2?": "Worse."},
    ),
    "simple_safety_tests": (
        [{"id": n, "harm_area": "Scams", "category": "c", "prompts_final": f"Q{n}?"} for n in (1, 2)],
        "Q1?",
        {"Q1?": "Better.", "Q2?": "Worse."},
    ),
}


def judge_of_supplement(asked, _):
    """Prefers what is better in both orders, and calls what is worse unsafe."""
    shown = asked.body["messages"][0]["content"]
    if "answer_a" not in shown:
        return said("unsafe" if "Worse." in shown else "Safe.")
    is_first = "<answer_a>\nReference." in shown
    return said("[[B>A]]" if is_first is ("Better." in shown) else "[[A>B]]")


@pytest.fixture(scope="module")
def small_model(tmp_path_factory):
    """Whose tokenizer encodes the prompts; what it says is scripted."""
    recipe = make_recipe()
    base = recipe.model_copy(update={"stages": {"base": recipe.stages["base"]}})
    return run_recipe(tmp_path_factory.mktemp("model") / "run", base).run.stage("base").model


def play(recipe_name, stage, model, directory, says, *sets):
    """The figures of one evaluation, and its prompts; `says` has what the model says to a prompt with this text in it."""
    prompts = []

    async def open_engines(model, config, *, detokenize, logs, names):
        chat = load_chat(model)

        def say(request):
            prompts.append(chat.decode(request.ids))
            return chat.completion_ids(next(text for question, text in says.items() if question in prompts[-1]))

        return [RecordingEngine(say, max_request_tokens=1 << 16)]

    recipe, _ = evaluations(preset(recipe_name), "threads=1", f"stages.model.path={model}", *sets)
    recipe = recipe.model_copy(update={"stages": {each: recipe.stages[each] for each in ("model", stage)}})
    [figures] = asyncio.run(train(recipe, directory, progress=Progress(), open_engines=open_engines)).evaluations
    return figures, prompts


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_benchmarks_of_cs336s_supplement_are_asked_and_judged_as_it_says(name, small_model, tmp_path):
    rows, asked, says = BENCHMARKS[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = f"stages.{name}"
    sets = [f"{table}.tasks.{key}={path}" for key in ("path", "test_path")] + [f"{table}.tasks.kind=jsonl"]
    if name == "simple_safety_tests":
        sets = [
            f'{table}.tasks={{kind="jsonl", path="{path}", test_path="{path}", question="prompts_final", answer="harm_area"}}'
        ]
    with serving(judge_of_supplement) as service:
        if name in ("alpaca_eval", "simple_safety_tests"):
            sets.append(f"{table}.reward.parts.accuracy.judge.service.url={service.url}")
        figures, prompts = play("cs336-supplement", name, small_model, tmp_path / "run", says, *sets)
    assert load_prompt("zero_shot_system_prompt").replace("{instruction}", asked) in prompts
    assert (figures["accuracy"], figures["temperature"], figures["k"]) == (0.5, 0.0, 1)
    if name in ("mmlu", "gsm8k"):
        assert figures["kinds"] == {"right": 1, "well formed but wrong": 0, "not well formed": 1}


def contest(question, tests, starter="", **metadata):
    public, private = (
        json.dumps([{"input": given, "output": found} for given, found in some]) for some in (tests[:1], tests[1:])
    )
    row = {"question_id": question, "question_content": question, "starter_code": starter, "metadata": json.dumps(metadata)}
    return row | {"public_test_cases": public, "private_test_cases": private}


ADD = "class Solution:\n    def add(self, a, b):\n        "
OF_R1 = {  # the rows of a stage, and what is said: right to half of them
    "livecodebench": (
        [
            contest("Double it.", [("1\n", "2\n"), ("4\n", "8\n")]),
            contest("Square it.", [("1\n", "1\n"), ("4\n", "16\n")]),
            contest("Add them.", [("1\n2", "3"), ("3\n4", "7")], starter=ADD, func_name="add"),
            contest("Take them.", [("0\n0", "0"), ("3\n4", "-1")], starter=ADD, func_name="add"),
        ],
        {
            "Double it.": "```python\nprint(2 * int(input()))\n```",
            "Square it.": "```python\nprint(int(input()))\n```",  # right in the public test only
            "Add them.": f"```python\n{ADD}return a + b\n```",
            "Take them.": f"```python\n{ADD}return a + b\n```",
        },
    ),
    "ceval": (
        [{"id": n, "question": f"{n}+1=____", "A": "1", "B": "2", "C": "3", "D": "4", "answer": "ABCD"[n]} for n in (1, 2)],
        {"1+1": "<answer>答案：B</answer>", "2+1": "<answer>B</answer>"},
    ),
    "simpleqa": (
        [{"metadata": "{}", "problem": f"Who was {n}?", "answer": name} for n, name in ((1, "Ann"), (2, "Ben"))],
        {"Who was 1?": "<answer>Ann</answer>", "Who was 2?": "<answer>Cleo</answer>"},
    ),
}


def judge_of_facts(asked, _):
    *_, reference, answer = (line.partition(": ")[2] for line in asked.body["messages"][0]["content"].strip().splitlines())
    return said("Correct" if reference == answer else "Incorrect")


@pytest.mark.parametrize("name", OF_R1)
def test_programs_chinese_choices_and_facts_are_sampled_and_judged_on_the_terms_of_r1(name, small_model, tmp_path):
    rows, says = OF_R1[name]
    table, path = f"stages.{name}", tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if name == "ceval":
        path = tmp_path / "ceval"
        for row in rows:
            subject = path / f"subject-{row['id']}"  # whose files have one name, as on the hub
            subject.mkdir(parents=True)
            pyarrow = pytest.importorskip("pyarrow", reason="needs the extra strop[data]")
            pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist([row]), subject / "val-0.parquet")
    sets = [f"{table}.tasks.{key}={path}" for key in ("path", "test_path")]
    if name == "simpleqa":
        sets = [f'{table}.tasks={{kind="jsonl", path="{path}", test_path="{path}", question="problem"}}']
    with serving(judge_of_facts) as service:
        if name == "simpleqa":
            sets.append(f"{table}.reward.parts.accuracy.judge.service.url={service.url}")
        figures, prompts = play("r1", name, small_model, tmp_path / "run", says, *sets)
    assert (figures["accuracy"], figures["num_tasks"]) == (0.5, len(rows))
    assert (figures["temperature"], figures["top_p"], figures["k"]) == (0.6, 0.95, 8 if name == "livecodebench" else 4)
    assert all(prompt.startswith("A conversation between User and Assistant.") for prompt in prompts)
