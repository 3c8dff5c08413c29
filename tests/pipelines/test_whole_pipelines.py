"""The papers' pipelines end to end on a tiny model: killed at random points, they end where an undisturbed run ends.

Real processes, the embedded engine, a real sandbox whose answers come after random times. Only sizes differ from the recipes.
"""

import random
import time

import pytest
from killing import HERE, complaint, events, finish, kill_when

from scripted_runs import untimed
from strop.recipe.load import load_recipe
from strop.run_directory import RunDirectory, read_json, read_lines
from strop.stages.loop.ledger import read_rollouts

RECIPES = HERE.parents[1] / "recipes"
LIMIT_S = 600
NUM_KILLS = 2

COMMON = """
threads=1 tasks.num_terms=2 tasks.max_digits=1 engine.slots=24 engine.max_length=256
limits.max_turns=3 limits.max_response_tokens=48 sampling.max_tokens=128 trainer.optimizer.warmup_updates=1
stages.base.tiny={hidden_size=64,num_layers=2,num_heads=2,intermediate_size=128,vocab_size=448,max_length=256,num_texts=64}
"""
COLD_START = """
stages.{0}.num_demonstrations=384 stages.{0}.steps=250 stages.{0}.batch_size=16 stages.{0}.trainer.optimizer.warmup_updates=5
"""
RL = "stages.{0}.steps=2 stages.{0}.tasks_per_step=4 stages.{0}.group_size=4 "
EVAL = "stages.{0}.num_tasks=4 stages.{0}.k=2 "

SIZES = {
    "rstar2-pipeline": COMMON
    + COLD_START.format("sft")
    + "".join(RL.format(name) for name in ("stage1", "stage2", "stage3"))
    + "".join(f"stages.{name}.tasks.limit=16 " for name in ("stage1", "stage2", "hard"))
    + "".join(EVAL.format(name) for name in ("after-sft", "after-stage1", "after-stage2", "after-stage3"))
    + "".join(
        f"stages.{name}.sampling.max_tokens=160 " for name in ("stage2", "hard", "stage3", "after-stage2", "after-stage3")
    )
    + "stages.stage3.limits.max_turns=4 stages.after-stage3.limits.max_turns=4 stages.stage1.steps=3",
    "r1-pipeline": COMMON
    + COLD_START.format("cold-start")
    + "".join(RL.format(name) for name in ("rl1", "rl2"))
    + "".join(EVAL.format(name) for name in ("after-rl1", "after-rl2", "before-student", "after-student"))
    + """
    stages.rejection.num_tasks=128 stages.teacher.num_tasks=48 stages.mixed.counts={rejection=48,general=16}
    stages.general.num_demonstrations=24 stages.general.tasks.max_digits=1
    stages.helpful.batch_size=16 stages.helpful.epochs=1
    stages.safe.batch_size=16 stages.safe.epochs=1 stages.rl2.tasks_per_step=8
    stages.rl1.schedule=[{every_updates=1,refresh_reference=true}]
    stages.rl2.schedule=[{at_step=2,tasks={kind="jsonl",path="r1-general.jsonl",dataset="strop"}},{every_updates=1,refresh_reference=true}]
    stages.sft2.steps=250 stages.sft2.batch_size=16 stages.sft2.trainer.optimizer.warmup_updates=5
    stages.student.steps=10 stages.student.batch_size=4 stages.student.trainer.optimizer.warmup_updates=2
    stages.small.tiny={hidden_size=32,num_layers=2,num_heads=2,intermediate_size=64,vocab_size=384,max_length=256,num_texts=64}
    """,
}


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("name", SIZES)
def test_a_pipeline_that_is_killed_at_random_points_ends_with_the_same_lineage_and_weights(name, tmp_path):
    path, words = RECIPES / f"{name}.toml", SIZES[name].split()
    stages = load_recipe(path, words).stages
    undisturbed, run = (RunDirectory(tmp_path / word / "run") for word in ("undisturbed", "killed"))
    for each in (undisturbed, run):
        each.path.parent.mkdir()
    finish(undisturbed, path, *words, limit_s=LIMIT_S)
    assert_nothing_is_vacuous(undisturbed, stages)

    told = kill_at_random(run, undisturbed, stages, path, words)
    assert len(told) == NUM_KILLS
    finish(run, path, *words, limit_s=LIMIT_S)
    for stage, config in stages.items():
        mine, theirs = run.stage(stage), undisturbed.stage(stage)
        assert read_json(mine.lineage) == read_json(theirs.lineage), (stage, told)
        if config.kind == "eval":
            assert untimed(read_json(mine.evaluation)) == untimed(read_json(theirs.evaluation)), (stage, told)
        elif "model" in read_json(theirs.done):
            weights = [each.model / "model.safetensors" for each in (mine, theirs)]
            assert weights[0].read_bytes() == weights[1].read_bytes(), (stage, told)
    assert lines(run) == lines(undisturbed), told
    assert not list(run.path.rglob(".*.tmp")), told


def kill_at_random(run, undisturbed, stages, path, words):
    """Kill the run at random points, each after a random share of the time that a stage took undisturbed; returns them.

    Of as many stages drawn as there are kills to come the first is next, so they spread over what is left of the run. A stage
    may be killed again, at another moment; one that was over before its kill came is not drawn any more.
    """
    draw = random.SystemRandom()
    able = [name for name, stage in stages.items() if stage.kind != "export"]  # behind it there is nothing to kill
    told = []
    while (left := NUM_KILLS - len(told)) > 0:
        to_come = [name for name in able if not run.stage(name).done.exists()]
        name = min(draw.choices(to_come, k=left), key=to_come.index)
        is_last_chance = to_come == [name] and left > 1  # were it to end, nothing would be left for the other kills
        share = 0.0 if is_last_chance else draw.uniform(0, 0.8)
        delay_s = read_json(undisturbed.stage(name).done)["time_s"] * share
        kill_when(run, moment(run, name, delay_s), *words, recipe=path, limit_s=LIMIT_S)  # fails unless a kill ended the run
        told.append((name, delay_s))
    return told


def moment(run, stage, delay_s):
    """Whether this try began `stage` so long ago, or finished it: how long it takes hangs on the machine's load."""
    tries = len(events(run, "stage_started", stage))
    began = []

    def is_time():
        if not began and len(events(run, "stage_started", stage)) > tries:
            began.append(time.monotonic())
        return bool(began) and (time.monotonic() - began[0] >= delay_s or run.stage(stage).done.exists())

    return is_time


def assert_nothing_is_vacuous(run, stages):
    """Rejection keeps rows, every RL stage has rollouts that are right and some that call a tool, every reward has its rows."""
    by_stage = {name: [line for line in read_lines(run.metrics) if line["stage"] == name] for name in stages}
    for name, stage in stages.items():
        if stage.kind in ("filter", "rejection_sampling", "mix"):
            assert read_lines(run.stage(name).path / "data" / "kept.jsonl"), name
        if stage.kind == "rl":
            assert max(line.get("rollout/accuracy", 0.0) for line in by_stage[name]) > 0, (name, complaint(run))
            assert max(line["rollout/tool_calls_mean"] for line in by_stage[name]) > 0, name
            for rule in stage.config.end_when:
                assert len(by_stage[name]) == stage.config.steps or rule.why_holds(by_stage[name]), name
    if "rl2" in stages:
        assert_languages_are_mixed_and_told(run, stages["rl1"])
        assert_general_prompts_and_their_rewards_come_last(run, stages["rl2"])
        for name in ("rl1", "rl2"):
            assert "refresh_reference = true" in str(events(run, "scheduled", name)), name
    if "hard" in stages:
        assert_the_filter_judges_what_was_trained_on(run, stages)


def assert_the_filter_judges_what_was_trained_on(run, stages):
    """rStar2-Agent's third stage: all the tasks that the stages before it had are filtered, and no other."""
    limit = stages["hard"].config.tasks.config.limit
    original = [line["id"] for line in read_lines(RECIPES / "rstar2-tasks.jsonl")][:limit]
    filtered = [line["task_id"] for line in read_lines(run.stage("hard").path / "data" / "outcomes.jsonl")]
    assert sorted(filtered) == sorted(original)
    kept = {line["id"] for line in read_lines(run.stage("hard").path / "data" / "kept.jsonl")}
    for name, tasks in {"stage1": set(original), "stage2": set(original), "stage3": kept}.items():
        assert trained_on(run, name) <= tasks, name


def trained_on(run, stage):
    steps = [line["step"] for line in read_lines(run.metrics) if line["stage"] == stage]
    return {scored.trajectory.task_id for step in steps for scored in read_rollouts(run.stage(stage).rollouts(step))}


def assert_languages_are_mixed_and_told(run, stage):
    """DeepSeek-R1's language consistency tells rollouts apart, and rejection drops those of several languages."""
    told = [each for step in range(1, stage.config.steps + 1) for each in read_rollouts(run.stage("rl1").rollouts(step))]
    assert len({scored.reward_parts["language"] for scored in told}) > 1
    dropped = read_lines(run.stage("rejection").path / "data" / "dropped.jsonl")
    assert any(row["reason"].startswith("mixed languages") for row in dropped)


def assert_general_prompts_and_their_rewards_come_last(run, stage):
    """DeepSeek-R1's second RL: rules judge reasoning, a reward model each of two sorts of general prompts, at its end alone."""
    [entry] = [entry for entry in stage.config.schedule if entry.tasks is not None]
    parts = stage.config.reward.parts
    assert {name for name, part in parts.items() if part.kind == "scorer"} == {"helpful", "safety"}
    by_kind = {}
    for step in range(1, stage.config.steps + 1):
        for scored in read_rollouts(run.stage("rl2").rollouts(step)):
            kind = scored.trajectory.task_id.rpartition("-")[0] if step >= entry.at_step else ""
            by_kind.setdefault(kind, []).append(scored)
            judging = {name for name, part in parts.items() if kind in part.config.where.get("kind", (kind,))}
            assert set(scored.reward_parts) == judging, (step, kind)
            weighted = [parts[name].config.weight * scored.reward_parts[name] for name in judging]
            assert scored.reward == pytest.approx(sum(weighted))
    assert set(by_kind) == {"", "reasoning", "helpful", "safety"}
    for kind in ("helpful", "safety"):  # a model that cannot tell one response from another would teach nothing
        assert len({scored.reward_parts[kind] for scored in by_kind[kind]}) > 1, kind


def lines(run):
    return [untimed(line) for line in read_lines(run.metrics)]
