"""Stages that make data: what they keep, what they drop and why, and what is trained on it."""

import json
import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from scripted_runs import RECIPE, recipe_of, run_recipe
from strop.config import from_keys
from strop.curation.rules import outcome_of
from strop.errors import MachineError, RunError
from strop.evaluation.metrics import verdict_of
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.evaluation import Eval
from strop.stages.filter import Filter, why_dropped
from strop.stages.mix import Mix
from strop.stages.rejection_sampling import RejectionSampling, foreign_share, reasons
from strop.tasks.files import writing_rows
from strop.types import Completion, FinishReason, Group, RolloutKey, ScoredTrajectory, StopReason, Task, Trajectory, Turn

RECIPES = Path(__file__).parents[2] / "recipes"
TASK = Task(id="t", question="1+1", answer="2", source="by hand")
SHARED = {"tasks": {"kind": "arithmetic"}, "init": "sft", "num_tasks": 1}


def dropped(group, stage):
    return why_dropped(outcome_of(group, verdict_of(stage.reward)), stage)


def turn_of(text):
    ids = tuple(text.encode())
    said = Completion(
        ids=ids,
        logprobs=(0.0,) * len(ids),
        entropies=(),
        is_forced=(False,) * len(ids),
        spans=((0, len(ids)),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )
    return Turn(completion=said, calls=(), observation_ids=(), completion_text=text, observation_text="")


def rollout(*texts, right=True, attempt=0, stop=StopReason.ANSWERED):
    """One of a turn for each of `texts`."""
    key = RolloutKey(task_index=0, attempt=attempt)
    trajectory = Trajectory(key=key, task_id="t", prompt_ids=(1,), turns=tuple(map(turn_of, texts)), stop_reason=stop)
    parts = {"language": 1.0} if right is None else {"accuracy": float(right)}
    return ScoredTrajectory(trajectory=trajectory, reward=float(right or 0.0), reward_parts=parts)


def group(*rollouts):
    return Group(task=TASK, task_index=0, trajectories=rollouts)


def stage_of(config, **keys):
    return from_keys(config.Config, SHARED | keys)


@pytest.mark.parametrize(
    ("num_right", "num_judged", "keys", "is_kept"),
    [
        (8, 8, {}, False),  # 8 of 8
        (7, 8, {}, True),
        (0, 8, {}, True),  # the paper's filter drops the easy ones alone
        (7, 7, {}, True),  # the one that is void might have been wrong
        (1, 8, {"min_right": 2}, False),
        (1, 7, {"min_right": 2}, True),  # the one that is void might have been right
        (8, 8, {"min_right": 2, "max_right": 8}, True),
    ],
)
def test_a_filter_keeps_by_how_many_of_k_are_right_and_void_ones_speak_for_neither_side(num_right, num_judged, keys, is_kept):
    stage = stage_of(Filter, k=8, **keys)
    played = group(*(rollout("x", right=n < num_right, attempt=n) for n in range(num_judged)))
    assert (dropped(played, stage) == "") is is_kept


def test_a_task_of_which_nothing_says_what_is_right_stays_as_one_whose_rollouts_are_void_does():
    stage = stage_of(Filter, k=4, min_right=2)
    assert dropped(group(*(rollout("x", right=None, attempt=n) for n in range(4))), stage) == ""
    assert dropped(group(*(rollout("x", right=False, attempt=n) for n in range(4))), stage) != ""


def test_rows_are_written_as_they_come_and_the_file_is_there_whole_or_not_at_all(tmp_path):
    path = tmp_path / "data" / "kept.jsonl"
    with writing_rows(path) as add:
        for number in range(3):
            add({"n": number})
        assert not path.exists()
    assert read_lines(path) == [{"n": 0}, {"n": 1}, {"n": 2}]

    def break_off():
        with writing_rows(path) as add:
            add({"n": 7})
            raise RunError("broken")

    with pytest.raises(RunError, match="broken"):
        break_off()
    assert read_lines(path) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert [each.name for each in path.parent.iterdir()] == ["kept.jsonl"]


def test_groups_of_a_fixed_set_come_in_its_order_and_in_parts_with_a_ledger_each(monkeypatch, tmp_path):
    """So that what is kept can be written as it comes, and no more is held, or read again, than one part."""
    stages = {name: PIPELINE[name] for name in ("base", "sft")} | {"good": PIPELINE["good"] | {"num_tasks": 7, "init": "sft"}}
    recipe = recipe_of(stages)
    at_once = run_recipe(tmp_path / "at-once", recipe).run.stage("good")
    monkeypatch.setattr("strop.stages.loop.fixed_set._TASKS_AT_ONCE", 3)
    in_parts = run_recipe(tmp_path / "in-parts", recipe).run.stage("good")
    found = [[read_lines(each.path / "data" / f"{name}.jsonl") for name in ("kept", "dropped")] for each in (at_once, in_parts)]
    assert found[0] == found[1]
    attempts = [row["trajectory"]["key"] for row in found[1][0]]
    assert attempts == sorted(attempts, key=lambda key: (key["task_index"], key["attempt"]))
    per_part = [
        {line["rollout"]["trajectory"]["key"]["task_index"] for line in read_lines(in_parts.rollouts(n))} for n in range(3)
    ]
    assert per_part == [{0, 1, 2}, {3, 4, 5}, {6}]


@pytest.mark.parametrize("tasks", [{"kind": "arithmetic"}, {"kind": "countdown"}, {"kind": "lookup", "path": "corpus.jsonl"}])
def test_a_set_without_end_is_refused_as_the_recipe_is_read(tasks):
    with pytest.raises(ValidationError, match="makes tasks without end"):
        stage_of(Filter, num_tasks=None, tasks=tasks)


def test_an_evaluation_at_temperature_0_makes_one_attempt():
    keys = {"init": "sft", "tasks": {"kind": "arithmetic"}, "sampling": {"temperature": 0.0}}
    assert from_keys(Eval.Config, keys | {"k": 1}).k == 1
    with pytest.raises(ValidationError, match="all 4 rollouts of a task would be the same"):
        from_keys(Eval.Config, keys | {"k": 4})


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("The sum is two.", ""),
        ("The sum 是二 obviously.", "mixed languages"),
        ("和是二。", ""),  # one language, if another
        ("x" * 2001, "long paragraph"),
        (("word " * 150 + "\n\n") * 4, ""),  # long, but in paragraphs
        ("See\n```python\nprint(2)\n```", "code block"),
        ('<tool_call>{"name": "python", "arguments": {"code": "```"}}</tool_call> two', ""),  # a call is no code block
    ],
)
def test_rejection_sampling_drops_what_does_not_read_well(text, reason):
    stage = stage_of(RejectionSampling)
    [found] = reasons(group(rollout(text)), stage)
    assert found.partition(":")[0] == reason


def test_turns_are_no_one_paragraph_since_a_tool_has_answered_between_them():
    stage = stage_of(RejectionSampling)
    call = '<tool_call>{"name": "python", "arguments": {"code": "print(2)"}}</tool_call>'
    long_alone, long_together = "so it is " * 250, "so it is " * 100
    assert reasons(group(rollout(*[long_together + call] * 4, "two")), stage) == [""]
    assert reasons(group(rollout(long_together + call, long_alone)), stage) == ["long paragraph: of 2249 characters"]


def test_rejection_sampling_keeps_right_whole_and_different_rollouts_up_to_a_number():
    stage = stage_of(RejectionSampling, max_per_task=2)
    found = reasons(
        group(
            rollout("one", right=False),
            rollout("one", right=None),
            rollout("two", stop=StopReason.LENGTH),
            rollout("three"),
            rollout("three"),
            rollout("four"),
            rollout("five"),
        ),
        stage,
    )
    assert [reason.partition(":")[0] for reason in found] == ["wrong", "no verdict", "truncated", "", "repeated", "", "enough"]


def test_the_share_of_foreign_words_leaves_out_code_mathematics_and_variables():
    assert foreign_share("два x y z три `print(two)` $alpha$") == 0
    assert foreign_share("one two 三 four") == pytest.approx(1 / 4)


@pytest.mark.parametrize(
    "text",
    [
        "Let θ be the angle of the two, so that the area is 9π.",
        "With x₁ and xᵢ for α′ the sum is ½, and 2πr² is µ.",
        "Then sinθ = Δx for all x in ℝ.",
        "угол θ равен x",
        "日本の和は x です",  # one language of two scripts
        "ตอบ 42",
        "42 = 6 * 7",
    ],
)
def test_variables_and_their_indices_are_no_words_of_another_language(text):
    assert foreign_share(text) == 0


@pytest.mark.parametrize(
    ("text", "share"),
    [
        ("the sum คน is", 1 / 4),
        ("the sum is ארבעים", 1 / 4),
        ("শত the sum is", 1 / 4),
        ("the sum είναι this", 1 / 4),
        ("שלום คน the sum", 1 / 2),
        ("שלום คน", 1 / 2),  # two scripts that are not listed are two
    ],
)
def test_a_word_of_any_other_script_is_seen(text, share):
    assert foreign_share(text) == pytest.approx(share)


def test_a_mix_names_each_of_its_sets_once():
    with pytest.raises(ValidationError, match=r"data names a twice, but rows are drawn without replacement\."):
        from_keys(Mix.Config, {"data": ["a", "b", "a"]})


STUDENT = RECIPE["stages"]["base"]
PIPELINE = {name: RECIPE["stages"][name] for name in ("base", "sft")} | {
    "hard": {"kind": "filter", "init": "sft", "num_tasks": 12, "k": 4, "max_right": 2},
    "rl": RECIPE["stages"]["rl"] | {"data": ["hard"]},
    "good": {"kind": "rejection_sampling", "init": "rl", "num_tasks": 8, "k": 4},
    "general": {
        "kind": "demonstrations",
        "init": "base",
        "demonstrator": {"kind": "arithmetic"},
        "num_demonstrations": 6,
    },
    "mixed": {"kind": "mix", "data": ["good", "general"], "counts": {"good": 5, "general": 3}},
    "again": {"kind": "sft", "init": "base", "data": ["mixed"], "steps": 2, "batch_size": 4},
    "small": STUDENT | {"tiny": STUDENT["tiny"] | {"vocab_size": 310}},
    "student": {"kind": "sft", "init": "small", "data": ["good"], "steps": 1, "batch_size": 4},
    "after": {"kind": "eval", "init": "again", "num_tasks": 2, "k": 2},
    "release": {"kind": "export", "init": "again", "results": ["after"]},
}


def make(**changes):
    stages = {name: stage | changes.get(name, {}) for name, stage in PIPELINE.items()}
    return recipe_of(stages)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run_recipe(tmp_path_factory.mktemp("pipeline") / "run", make())


def kept(run, stage):
    return read_lines(run.stage(stage).path / "data" / "kept.jsonl")


def test_a_filter_writes_every_task_once_kept_or_dropped_with_its_reason(whole):
    tasks, dropped = kept(whole.run, "hard"), read_lines(whole.run.stage("hard").path / "data" / "dropped.jsonl")
    assert len(tasks) + len(dropped) == 12
    assert tasks
    assert dropped
    assert all(row["num_right"] > 2 and "too easy" in row["reason"] for row in dropped)


def judge_lost_on_one(task: Task, trajectory) -> float:
    if task.question == "1+1":
        raise MachineError("the judge timed out")
    return 1.0


def judge_lost(task: Task, trajectory) -> float:
    raise MachineError("the judge timed out")


def sampled(tmp_path, kind, judge, **keys):
    """A run whose last stage plays three sums of a file, judged by `judge`."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"question": f"{n}+1", "answer": str(n + 1)}) + "\n" for n in (1, 2, 3)))
    stage = {"kind": kind, "init": "base", "tasks": {"kind": "jsonl", "path": str(path)}, "k": 2} | keys
    stage |= {"reward": {"kind": "function", "function": f"test_data_stages:{judge}", "right_above": 0}}
    recipe = RECIPE | {"stages": {"base": STUDENT, "played": stage}}
    return run_recipe(tmp_path / "run", Recipe.model_validate_json(json.dumps(resolve(recipe))))


def test_void_rollouts_are_told_with_their_reason(tmp_path):
    done = sampled(tmp_path, "filter", "judge_lost_on_one", max_right=2)
    [warning] = [text for text in done.progress.warnings if "void" in text]
    # Its two attempts and the two that took their places.
    assert warning.startswith("4 rollouts are void and are not counted. The most frequent reason: the judge timed out")


def test_a_stage_whose_every_rollout_is_void_ends_with_the_reason(tmp_path):
    with pytest.raises(MachineError, match=r"every rollout of 3 tasks is void.*the judge timed out\. All reasons are in"):
        sampled(tmp_path, "rejection_sampling", "judge_lost")
    assert not (tmp_path / "run" / "stages" / "played" / "data" / "kept.jsonl").exists()


def test_rl_trains_on_the_tasks_that_the_filter_kept_and_on_no_other(whole):
    wanted = {row["question"] for row in kept(whole.run, "hard")}
    for step in (1, 2):
        played = {each["task"]["question"] for each in read_json(whole.run.stage("rl").selection(step))["groups"]}
        assert played <= wanted


def test_rejected_samples_are_right_and_carry_the_ids_that_were_sampled(whole):
    rows = kept(whole.run, "good")
    assert rows
    for row in rows:
        assert row["messages"][-1]["content"].endswith(f"\\boxed{{{row['task']['answer']}}}</answer>")
        roles = [message["role"] for message in row["messages"]]
        assert roles[-1] == "assistant"
        assert roles.count("assistant") == len(row["trajectory"]["turns"])


def test_a_mix_has_so_many_of_each_and_none_twice(whole):
    rows = kept(whole.run, "mixed")
    assert len(rows) == 8
    said = [json.dumps(row["trajectory"]) for row in rows]
    assert len(set(said)) == 8
    good = {json.dumps(row["trajectory"]) for row in kept(whole.run, "good")}
    assert sum(each in good for each in said) == 5


def test_an_export_is_a_model_with_a_card_and_the_lineage_of_what_it_stands_on(whole):
    directory = whole.run.stage("release").model
    weights = (directory / "model.safetensors").read_bytes()
    assert weights == (whole.run.stage("again").model / "model.safetensors").read_bytes()
    lineage = read_json(directory / "lineage.json")
    assert set(lineage) == {"base", "sft", "hard", "rl", "good", "general", "mixed", "again"}
    card = (directory / "README.md").read_text()
    assert "| mixed | mix | good (data), general (data) |" in card
    assert "| after | again |" in card


def test_a_lineage_names_its_parents_and_their_results(whole):
    lineage = {name: read_json(whole.run.stage(name).lineage) for name in PIPELINE}
    assert lineage["rl"]["parents"] == {"sft": lineage["sft"]["product"], "hard": lineage["hard"]["product"]}
    assert all("product" in each for name, each in lineage.items() if name != "after")


def test_a_changed_stage_is_named_with_all_that_stand_on_it_and_made_anew_on_request_alone(whole, tmp_path):
    run = RunDirectory(shutil.copytree(whole.run.path, tmp_path / "run"))
    before = {name: read_json(run.stage(name).lineage) for name in PIPELINE}
    changed = make(mixed={"counts": {"good": 4, "general": 4}})
    with pytest.raises(RunError, match=r"mixed: stages\.mixed\.counts\.general: 3 -> 4"):
        run_recipe(run.path, changed)
    with pytest.raises(RunError, match=r"mixed: stages\.mixed\.counts\.general: 3 -> 4"):
        run_recipe(run.path, changed, start="student")

    run_recipe(run.path, changed, start="mixed", until="mixed")
    assert read_json(run.stage("again").stale) == {"because": "mixed has another result"}
    with pytest.raises(RunError, match=r"stale:\n  again: mixed has another result\n  after: again is stale") as caught:
        run_recipe(run.path, changed)
    assert "student" not in str(caught.value)
    assert "--from again" in str(caught.value)

    run_recipe(run.path, changed, start="again")
    after = {name: read_json(run.stage(name).lineage) for name in PIPELINE}
    anew = {name for name in PIPELINE if before[name] != after[name]}
    assert anew == {"mixed", "again", "after", "release"}
    assert not run.stage("again").stale.exists()
    assert {path.name for path in (run.path / "stale").iterdir()} == {"mixed-1", "again-1", "after-1", "release-1"}
