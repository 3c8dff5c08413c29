"""The experiments on whole pipelines: what they measure, what their rows hold, and that every part runs from end to end."""

import asyncio
import json
import random
import re
import sys
from pathlib import Path

import pytest

from strop.pipeline.run import train
from strop.pipeline.sweep_file import load_sweep
from strop.reports.trackers import Progress
from strop.run_directory import RunDirectory, read_json, write_json, write_text

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import pipelines_distil
import pipelines_drawings as drawings
import pipelines_measures as measures
import pipelines_rows as rows
import pipelines_truth as truth

import pipelines

EXPERIMENTS = Path(pipelines.__file__).parent
SMALLEST = ("threads=1", "stages.base.tiny={hidden_size=32, num_layers=1, num_heads=2, intermediate_size=32, num_texts=40}")
SMALL_START = (
    "stages.sft.steps=2",
    "stages.sft.num_demonstrations=8",
    "stages.sft.batch_size=4",
    "stages.sft.trainer.optimizer.warmup_updates=0",
)


def rl(stage, tasks_per_step=2):
    sizes = ("steps=2", f"tasks_per_step={tasks_per_step}", "group_size=2", "updates_per_step=1", "give_up_after=9")
    return tuple(f"stages.{stage}.{size}" for size in sizes)


def evals(*stages):
    return tuple(f"stages.{stage}.num_tasks=3" for stage in stages)


TINY = {
    "stages": (
        *(each for stage in pipelines.STAGES for each in rl(stage)),
        *evals(*pipelines.AFTER_STAGES),
        "stages.hard.num_tasks=4",
        "stages.hard.k=1",
        "sampling.max_tokens=24",
        *(f"stages.{stage}.sampling.max_tokens=24" for stage in ("stage2", "stage3", "hard", *pipelines.AFTER_STAGES)),
    ),
    "hacking": (
        *(each for stage in pipelines.PUSHED for each in rl(stage)),
        *evals("before", "after_short", "after_long"),
        "stages.judge.batch_size=600",
        "stages.judge.trainer.optimizer.warmup_updates=0",
        "sampling.max_tokens=24",
    ),
    "language": (*rl("rl"), *evals("before", "after"), "sampling.max_tokens=24"),
    "ppo": (
        "stages.rl.steps=2",
        "stages.rl.trainer.critic.alone_steps=1",
        "stages.rl.give_up_after=9",
        *evals("before", "after"),
        *(f"stages.{stage}.sampling.max_tokens=24" for stage in ("before", "rl", "after")),
    ),
}
TINY["hacking-again"] = TINY["hacking-noisy"] = TINY["hacking"]


def check_results(part, runs, directory):
    """Every comparison has its figures, every drawing its curves, and one seed has no verdict."""
    results = directory / "results" / "pipelines"
    text = pipelines.write_results(part, runs, results, overrides=["a.size=1"])
    found = read_json(results / f"{part.name}.json")
    assert "A PILOT of one seed, which decides nothing. Changed: a.size=1." in text
    assert len(found["differences"]) == len(part.differences)
    assert all(each["verdict"].startswith("pilot") for each in found["differences"])
    assert found["bars"]
    assert all(bar["holds"] is None for bar in found["bars"].values())
    for drawn in part.drawings:
        name = f"{part.name}-{drawn.name}" if drawn.name else part.name
        svg = (results / f"{name}.svg").read_text()
        assert '<path class="line s0"' in svg
        assert "missing:" not in svg


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_part_runs_from_rows_to_drawings(name, tmp_path):
    part = pipelines.PARTS[name]
    rows.write_rows(tmp_path / "rows")
    filled = pipelines.write_sweep(part.sweep, [7], tmp_path / name)
    sweep = load_sweep(filled, [*SMALLEST, *SMALL_START, *TINY[name]])
    runs = {}
    for arm in sweep.arms:
        run = RunDirectory(tmp_path / name / arm.run_name(7))
        asyncio.run(train(arm.recipes[7], run.path, progress=Progress()))
        runs[arm.name] = {7: run}
    check_results(part, runs, tmp_path)


@pytest.mark.slow
def test_students_imitate_equally_many_tokens_and_a_second_call_trains_nothing_anew(tmp_path):
    students = ("steps=5", "batch_size=2", "trainer.optimizer.warmup_updates=0")
    sizes = [
        *SMALLEST,
        SMALLEST[1].replace("base", "small"),
        *SMALL_START,
        "stages.sft.steps=60",  # enough to end a turn, which is all that is asked of it
        "stages.sft.num_demonstrations=32",
        "stages.sft.batch_size=8",
        "stages.sft.trainer.optimizer.lr=1e-2",
        'stages.sft.demonstrator={kind="arithmetic", guess_fraction=1.0}',
        *rl("teacher"),
        *evals(*pipelines.PARTS["distil"].evaluations),
        *(f"stages.{stage}.{size}" for stage in pipelines_distil.STUDENTS.values() for size in students),
        "stages.demonstrated.num_demonstrations=6",
        "stages.demonstrated_right.num_demonstrations=6",
        "stages.distilled.num_tasks=6",
        "stages.distilled.k=2",
        "stages.distilled.max_foreign_share=1.0",
        'stages.distilled.reward={kind="sum", parts={accuracy={kind="function", function="pipelines_truth:num_remarks"}}}',
    ]
    run = asyncio.run(pipelines_distil.run_seed(7, tmp_path, sizes))
    check_results(pipelines.PARTS["distil"], {"students": {7: run}}, tmp_path)
    tokens = read_json(run.path / "tokens.json")
    wanted = tokens["distilled"]["imitated_tokens"]
    assert tokens["distilled"]["steps"] == 5
    for arm, stage in pipelines_distil.STUDENTS.items():
        told = tokens[arm]
        assert abs(told["imitated_tokens"] - wanted) <= told["imitated_tokens_per_update"] / 2
        assert read_json(run.manifest)["recipe"]["stages"][stage]["steps"] == told["steps"]
    made = {path: path.stat().st_mtime_ns for path in run.path.rglob("done.json")}
    asyncio.run(pipelines_distil.run_seed(7, tmp_path, sizes))
    assert {path: path.stat().st_mtime_ns for path in run.path.rglob("done.json")} == made


def test_a_true_reward_is_that_of_the_remarks_asked_for():
    polite, rude, neutral = truth.POLITE[0], truth.RUDE[0], "it is by the door"
    assert truth.worth(polite) == 1.0
    assert truth.worth(neutral) == 0.0
    assert truth.worth(f"{polite}, {rude}") == 0.0
    assert truth.worth(", ".join([polite] + [neutral] * 5)) == 1.0  # six remarks
    assert truth.worth(", ".join([polite] + [neutral] * 7)) == 0.5  # eight
    assert truth.worth(", ".join([polite] + [neutral] * 19)) == 0.0


def test_no_pair_shows_a_longer_list_than_the_true_reward_forgives():
    made = rows.pairs(200, seed=0, share_longer=rows.SHARES_LONGER["biased"])
    assert max(len(truth.split_remarks(text)) for pair in made for text in pair.responses) == truth.MOST_WANTED
    assert all(truth.worth(pair.chosen) == 1.0 and truth.worth(pair.rejected) == 0.0 for pair in made)
    longer = sum(len(truth.split_remarks(pair.chosen)) > len(truth.split_remarks(pair.rejected)) for pair in made)
    assert 0.7 < longer / len(made) < 0.9


def test_a_thought_carries_a_wrong_step_on_and_english_is_wrong_more_often():
    wrong = {"en": [], "ru": []}
    for seed in range(400):
        text = rows.thought([3, 5, 4, 2], random.Random(seed))
        total = 3
        steps = re.findall(r"([^.<>]+?) (\d+)\+(\d) \w+(?: \w+)? (\d+)\.", text)
        for (words, before, added, after), digit in zip(steps, (5, 4, 2), strict=True):
            assert (int(before), int(added)) == (total, digit)
            wrong["en" if "now" in words else "ru"].append(int(after) != total + digit)
            total = int(after)
        assert text.endswith(f"\\boxed{{{total}}}</answer>")
    for language, found in wrong.items():
        assert sum(found) / len(found) == pytest.approx(rows.WRONG_STEPS[language], abs=0.06)


def test_graded_sums_differ_in_difficulty_and_no_operands_are_tested_that_were_trained_on():
    train_rows, test_rows = (rows.graded_sums(split, num_of_grade=30) for split in ("train", "test"))
    operands = [{tuple(sorted(re.findall(r"\d+", row["question"]))) for row in each} for each in (train_rows, test_rows)]
    assert not operands[0] & operands[1]
    assert {len(each) for each in operands[0]} == set(rows.GRADES)
    assert len({row["question"] for row in train_rows}) == 30 * len(rows.GRADES)


@pytest.mark.parametrize(
    ("expected", "low", "high", "by_seed", "said"),
    [
        ("more", 0.1, 0.3, [0.1, 0.3], "as expected"),
        ("more", 0.1, 0.3, [-0.1, 0.5], "not shown"),  # the interval is above 0, one seed is not
        ("more", -0.1, 0.3, [0.1, 0.1], "not shown"),
        ("more", -0.3, -0.1, [-0.2, -0.2], "opposite"),
        ("less", -0.3, -0.1, [-0.2, -0.2], "as expected"),
        ("less", 0.1, 0.3, [0.2, 0.2], "opposite"),
        ("not less", -0.04, 0.01, [-0.1, 0.01], "as expected"),
        ("not less", -0.06, 0.01, [-0.1, 0.01], "as expected, but a loss of 0.05 is not excluded"),
        ("not less", -0.1, -0.01, [-0.1, -0.01], "opposite"),
    ],
)
def test_a_verdict_needs_the_interval_and_every_seed(expected, low, high, by_seed, said):
    assert measures.verdict(expected, low=low, high=high, by_seed=by_seed) == said


def write_evaluation(run, stage, correct, **parts):
    problems = [
        {"id": f"grade-{2 + number}/x", "correct": each, "parts": {name: values[number] for name, values in parts.items()}}
        for number, each in enumerate(correct)
    ]
    write_json(run.stage(stage).evaluation, {"accuracy": 0.5, "parts": {}})
    lines = "".join(f"{json.dumps(each)}\n" for each in problems)
    write_text(run.stage(stage).evaluation.parent / "problems.jsonl", lines)


def test_differences_are_taken_problem_by_problem_and_seed_by_seed(tmp_path):
    runs = {}
    for arm, gain in (("one", 0), ("two", 1)):
        runs[arm] = {}
        for seed in (0, 1):
            run = RunDirectory(tmp_path / f"{arm}-{seed}")
            write_evaluation(run, "after", [[0, gain], [0, 0], []], score=[[1.0, 2.0], [3.0, 3.0 + gain], []])
            runs[arm][seed] = run
    one, two = (measures.Side(arm=arm, stage="after") for arm in runs)
    found = measures.judged(runs, measures.Difference(figure="accuracy", first=one, second=two, is_deciding=True))
    assert found["by_seed"] == {"0": 0.25, "1": 0.25}  # a half of one problem of two; the void one is left out
    assert measures.bars([found])["accuracy: two.after - one.after"]["holds"] == (found["verdict"] == "as expected")
    score = measures.judged(runs, measures.Difference(figure="score", first=one, second=two))
    assert score["mean"] == pytest.approx(0.25)
    assert measures.by_grade(runs["two"], "after") == {
        "grade-2": {"0": 0.5, "1": 0.5},
        "grade-3": {"0": 0.0, "1": 0.0},
    }


@pytest.mark.parametrize("name", sorted(pipelines.PARTS))
def test_what_a_part_compares_is_in_its_recipe_and_its_hypothesis_was_written(name, tmp_path):
    part = pipelines.PARTS[name]
    said = (EXPERIMENTS / "hypotheses" / "pipelines.md").read_text()
    assert f"\n## {name}: " in said
    assert pipelines.PILOT_SEED not in part.seeds
    assert {side.stage for each in part.differences for side in (each.first, each.second)} <= set(part.evaluations)
    assert any(each.is_deciding for each in part.differences)
    if part.sweep is None:
        return
    sweep = load_sweep(pipelines.write_sweep(part.sweep, pipelines.SEEDS, tmp_path / name))
    arms = {arm.name: arm.recipes[0].stages for arm in sweep.arms}
    assert {side.arm for each in part.differences for side in (each.first, each.second)} == set(arms)
    drawn = {
        stage for each in part.drawings for stage in (each.evaluations if isinstance(each, drawings.Rungs) else each.stages)
    }
    wanted = drawn | set(part.evaluations)
    assert all(wanted <= set(stages) for stages in arms.values())
