"""SFT on those demonstrations alone that the reward calls right: what is kept, what is said of the rest, what is refused."""

import json

import pytest

from scripted_runs import RECIPE, answer, run_recipe
from strop.config import validate
from strop.cs336 import r1_zero_reward_fn
from strop.errors import ConfigError, MachineError, TaskError
from strop.recipe.recipe import Recipe, resolve
from strop.rollout.prompt import load_prompt
from strop.run_directory import read_json, read_lines
from strop.stages import sft as sft_stage
from strop.tasks import TaskSource
from strop.types import Task

R1_ZERO = {"kind": "sum", "parts": {"accuracy": {"kind": "r1_zero"}}}
RECORDED = {"kind": "recorded"}
TRACES = [  # (the true answer, what somebody wrote, what is right by hand)
    ("4", "2+2. </think> <answer> 4 </answer>", True),
    ("4", "2+2. </think> <answer> 5 </answer>", False),
    (r"\frac{1}{2}", "Half. </think> <answer> 1/2 </answer>", True),  # the same number, written another way
    ("7", "It is 7.", False),  # right, but not in the form
    ("9", r"3*3. </think> <answer> \boxed{9} </answer>", True),
    ("9", r"3*3. </think> <answer> \boxed{8} </answer>", False),
    ("x+1", "So. </think> <answer> 1+x </answer>", True),
]


class Killed(BaseException):
    """What nobody catches."""


def recipe_of(tmp_path, *, rows=None, stages=None, **sft):
    """SFT on recorded traces, in batches of two, judged as CS336 judges them."""
    path = tmp_path / "traces.jsonl"
    told = rows or [{"question": f"Q{n}", "answer": gold, "response": said} for n, (gold, said, _) in enumerate(TRACES)]
    path.write_text("".join(json.dumps(row) + "\n" for row in told))
    keys = {"tasks": {"kind": "jsonl", "path": str(path), "facts": ["response"]}, "demonstrator": RECORDED}
    keys |= {"num_demonstrations": len(told), "batch_size": 2, "reward": R1_ZERO, "only_right": True}
    return made({"sft": RECIPE["stages"]["sft"] | keys | sft} | (stages or {}))


def made(stages):
    return validate(Recipe, resolve(RECIPE | {"stages": {"base": RECIPE["stages"]["base"]} | stages}), place="test")


def verdicts_of(run, stage="sft"):
    return read_lines(run.stage(stage).path / "data" / "verdicts.jsonl")


@pytest.fixture
def imitated(monkeypatch):
    """The demonstrations of every batch that an SFT stage trains on."""
    seen = []
    pack = sft_stage.pack_demonstrations

    def recording(rows):
        seen.extend(rows)
        return pack(rows)

    monkeypatch.setattr(sft_stage, "pack_demonstrations", recording)
    return seen


def test_recorded_traces_are_kept_where_the_grader_calls_them_right(tmp_path, imitated):
    found = run_recipe(tmp_path / "run", recipe_of(tmp_path))
    run = found.run
    rows = read_lines(run.stage("sft").path / "data" / "demonstrations.jsonl")
    played = [row["trajectory"] for row in rows]
    verdicts = verdicts_of(run)
    numbers = [int(row["id"].rpartition(":")[2]) - 1 for row in verdicts]  # a task is called by its line
    assert sorted(numbers) == list(range(7))
    assert [row["is_kept"] for row in verdicts] == [TRACES[number][2] for number in numbers]
    assert [row["is_kept"] for row in verdicts] == [
        r1_zero_reward_fn(trajectory["turns"][0]["completion_text"], row["answer"])["reward"] == 1.0
        for trajectory, row in zip(played, verdicts, strict=True)
    ]
    assert {row["reason"] for row in verdicts if not row["is_kept"]} == {"wrong: its answer is not right"}
    right = [tuple(each["turns"][0]["completion"]["ids"]) for each, row in zip(played, verdicts, strict=True) if row["is_kept"]]
    trained = [tuple(segment.ids) for each in imitated for segment in each.segments if segment.is_demonstrator]
    assert sorted(trained) == sorted(right)  # two steps of two: an epoch of the four
    assert found.progress.stages[-1][1].startswith(
        "2 updates on 4 of 7 demonstrations, those that are right (dropped: 3 wrong), last loss"
    )
    assert read_json(run.stage("sft").done)["summary"].startswith("2 updates on 4 of 7 demonstrations")
    (event,) = [line for line in read_lines(run.events) if line["event"] == "demonstrations_judged"]
    assert (event["num_kept"], event["num_dropped"], event["dropped"]) == (4, 3, {"wrong": 3})


def test_two_stages_share_demonstrations_of_which_one_takes_those_that_are_right(tmp_path, imitated):
    demonstrations = {
        "kind": "demonstrations",
        "init": "base",
        "demonstrator": {"kind": "arithmetic"},
        "num_demonstrations": 24,
    }
    shared = {"kind": "sft", "init": "base", "data": ["demonstrations"], "steps": 6, "batch_size": 4}
    recipe = made({"demonstrations": demonstrations, "all": shared, "right": shared | {"only_right": True, "steps": 1}})
    run = run_recipe(tmp_path / "run", recipe).run
    rows = read_lines(run.stage("demonstrations").path / "data" / "kept.jsonl")
    verdicts = verdicts_of(run, "right")
    assert [row["task"]["id"] for row in rows] == [row["id"] for row in verdicts]
    assert [answer(row["task"]["answer"]) in row["messages"][-1]["content"] for row in rows] == [
        row["is_kept"] for row in verdicts
    ]
    ids = [tuple(each.ids) for each in imitated]
    everything, right = ids[:24], ids[24:]
    assert len(right) == 4
    assert set(right) < set(everything)


def test_an_interrupted_stage_judges_once_and_ends_with_the_same_weights(tmp_path, monkeypatch):
    recipe = recipe_of(tmp_path)
    whole = run_recipe(tmp_path / "whole", recipe).run
    asked = []
    make_reward = sft_stage.make_reward

    def counting(*arguments):
        asked.append(1)
        return make_reward(*arguments)

    async def killed_in_the_middle(*_):
        raise Killed

    def killed_before_the_first_step(*_, **__):
        raise Killed

    monkeypatch.setattr(sft_stage, "make_reward", counting)
    with monkeypatch.context() as patched:
        patched.setattr(sft_stage, "_judged", killed_in_the_middle)
        with pytest.raises(Killed):
            run_recipe(tmp_path / "run", recipe)
        assert not (tmp_path / "run" / "stages" / "sft" / "data" / "verdicts.jsonl").exists()
    with monkeypatch.context() as patched:
        patched.setattr(sft_stage.Trainer, "from_directory", killed_before_the_first_step)
        with pytest.raises(Killed):
            run_recipe(tmp_path / "run", recipe)
    again = run_recipe(tmp_path / "run", recipe).run
    assert len(asked) == 2  # by the try that was killed as it judged, and the next; not by the last
    assert verdicts_of(again) == verdicts_of(whole)
    weights = [(run.stage("sft").path / "model" / "model.safetensors").read_bytes() for run in (whole, again)]
    assert weights[0] == weights[1]


@pytest.mark.parametrize(
    ("right", "message"),
    [
        (0, r"none of 4 demonstrations is right \(4 wrong\)\. The first is of task .*whose true answer is '2'.*--from sft"),
        (1, r"1 of 4 demonstrations, those that are right \(dropped: 3 wrong\), fewer than batch_size = 2"),
    ],
)
def test_too_few_right_ones_are_told_with_their_numbers(tmp_path, right, message):
    rows = [
        {"question": f"Q{n}", "answer": "2", "response": f"</think> <answer> {2 if n < right else 3} </answer>"}
        for n in range(4)
    ]
    with pytest.raises(TaskError, match=message):
        run_recipe(tmp_path / "run", recipe_of(tmp_path, rows=rows))


class WithoutAnswers(TaskSource):
    num_tasks = 4

    def task(self, index):
        facts = {"response": "</think> <answer> 2 </answer>"}
        return Task(id=f"t{index % 4}", question="Q", answer="", source="test", facts=facts)


def test_answers_of_another_file_are_joined_by_the_problem_within_the_prompt(tmp_path):
    """The files of CS336 assignment 5, section 4.3: whole prompts with responses, and problems with answers."""
    whole = load_prompt("r1_zero").raw
    rows = [{"prompt": whole.replace("{question}", f"Q{n}"), "response": said} for n, (_, said, _) in enumerate(TRACES)]
    truths = tmp_path / "train.jsonl"
    truths.write_text("".join(json.dumps({"problem": f"Q{n}", "answer": TRACES[n][0]}) + "\n" for n in (6, 5, 4, 3, 2, 1, 0)))
    columns = {"kind": "jsonl", "path": str(tmp_path / "traces.jsonl"), "question": "prompt", "answer": "response"}
    joined = {"kind": "jsonl", "path": str(truths), "question": "problem"}
    keys = {"tasks": columns | {"facts": ["response"]}, "prompt": "r1_zero", "truths": joined}
    verdicts = verdicts_of(run_recipe(tmp_path / "run", recipe_of(tmp_path, rows=rows, **keys)).run)
    numbers = [int(row["id"].rpartition(":")[2]) - 1 for row in verdicts]
    assert [(row["answer"], row["is_kept"]) for row in verdicts] == [(TRACES[n][0], TRACES[n][2]) for n in numbers]

    truths.write_text(json.dumps({"problem": "another", "answer": "4"}))
    with pytest.raises(
        TaskError, match=r"truths: .*train\.jsonl has no row with the question of task .* of .*, 'Q\d'\. Add the row"
    ):
        run_recipe(tmp_path / "again", recipe_of(tmp_path, rows=rows, **keys))
    with pytest.raises(ConfigError, match="truths has answers to judge demonstrations by, but only_right is false"):
        recipe_of(tmp_path, rows=rows, **keys, only_right=False)


def test_a_task_without_a_true_answer_is_refused_by_its_name(tmp_path):
    tasks = {"kind": f"{__name__}:WithoutAnswers"}
    with pytest.raises(TaskError, match=r"only_right is true, but task 't\d' has no true answer"):
        run_recipe(tmp_path / "run", recipe_of(tmp_path, tasks=tasks, num_demonstrations=4))


def test_conversations_that_somebody_wrote_down_have_no_true_answer(tmp_path):
    said = [{"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}] * 4
    (tmp_path / "said.jsonl").write_text("".join(json.dumps(row) + "\n" for row in said))
    written = {"kind": "conversations", "path": str(tmp_path / "said.jsonl")}
    sft = {"kind": "sft", "init": "base", "data": ["written"], "steps": 1, "batch_size": 2, "only_right": True}
    with pytest.raises(TaskError, match=r"only_right is true, but conversation .* has no true answer to judge it by"):
        run_recipe(tmp_path / "run", made({"written": written, "sft": sft}))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"reward": {"kind": "sum", "parts": {"form": {"kind": "r1_zero_format"}}}}, "no part of reward says what is right"),
    ],
)
def test_what_cannot_be_judged_is_refused_as_the_recipe_is_read(tmp_path, keys, message):
    with pytest.raises(ConfigError, match=message):
        recipe_of(tmp_path, **keys)


faults = {}


def sometimes_lost(task, trajectory):
    """Right, but the judge of some tasks is lost for the first so many times."""
    faults[task.question] = faults.get(task.question, 0) - 1
    if faults[task.question] >= 0:
        raise MachineError("the judge timed out")
    return 1.0


FUNCTION = {"kind": "function", "function": f"{__name__}:sometimes_lost", "right_above": 0}


def test_what_nobody_could_judge_is_not_called_wrong(tmp_path):
    faults.clear()
    faults["Q1"] = 1
    found = run_recipe(tmp_path / "run", recipe_of(tmp_path, reward=FUNCTION))
    reasons = {row["reason"] for row in verdicts_of(found.run)}
    assert reasons == {"", "void: the judge timed out"}
    assert "6 of 7 demonstrations, those that are right (dropped: 1 void)" in found.progress.stages[-1][1]
    assert found.progress.warnings == [
        "1 of 7 demonstrations could not be judged and are dropped; the first is void: the judge timed out"
    ]


def test_a_judge_that_is_lost_altogether_ends_the_try_and_the_next_asks_again(tmp_path):
    faults.clear()
    faults.update({f"Q{n}": 1 for n in range(7)})
    recipe = recipe_of(tmp_path, reward=FUNCTION)
    with pytest.raises(MachineError, match="no demonstration of 7 could be judged; the first is void: the judge timed out"):
        run_recipe(tmp_path / "run", recipe)
    found = run_recipe(tmp_path / "run", recipe)
    assert "7 of 7 demonstrations, those that are right (dropped: none)" in found.progress.stages[-1][1]
