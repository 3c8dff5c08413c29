"""An RL stage whose rollouts branch: what a recipe may say of it, and what is left of a run."""

import json
import re

import pytest
from pydantic import ValidationError

from scripted_runs import RECIPE, RecordingEngine, answer, assert_same_training, falling, lines_of, make_recipe, run_recipe
from strop.errors import ConfigError
from strop.pipeline.plan import check_stages
from strop.recipe.recipe import Recipe, resolve
from strop.run_directory import read_lines
from strop.stages.context import load_chat
from strop.stages.loop.ledger import read_rollouts
from strop.types import StopReason


def recipe_with(**tables):
    rl = RECIPE["stages"]["rl"] | {"branching": {"initial_rollouts": 3}}
    tree = RECIPE | {"stages": RECIPE["stages"] | {"rl": rl}} | tables
    return Recipe.model_validate_json(json.dumps(resolve(tree)))


def test_more_rollouts_at_the_prompt_than_there_are_are_refused():
    with pytest.raises(ValidationError, match=r"initial_rollouts is 7, but a task has 6 rollouts in all"):
        make_recipe(branching={"initial_rollouts": 7})
    recipe = make_recipe(branching={"initial_rollouts": 7}, method={"kind": "grpo_roc", "oversample": 2})
    assert recipe.stages["rl"].config.branching


def test_the_static_policy_is_refused_and_a_server_is_not():
    check_stages(recipe_with(engine={"kind": "vllm", "python": "true", "max_length": 256}), ["rl"])
    with pytest.raises(ConfigError, match=r"branching would wait for memory of rollouts that wait for its branches"):
        check_stages(recipe_with(scheduler={"policy": "static"}), ["rl"])
    assert recipe_with().stages["rl"].config.branching.initial_rollouts == 3


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    recipe = make_recipe(method="arpo", branching={"initial_rollouts": 3, "base_probability": 0.9})
    return run_recipe(tmp_path_factory.mktemp("run") / "run", recipe)


def test_a_step_has_full_groups_of_trees(finished):
    metrics = lines_of(finished.run)
    assert len(metrics) == 2
    for step, line in enumerate(metrics, start=1):
        scored = read_rollouts(finished.run.stage("rl").rollouts(step))
        groups = json.loads(finished.run.stage("rl").selection(step).read_text())["groups"]
        assert [len(group["rollouts"]) for group in groups] == [6, 6, 6]
        in_groups = {tuple(entry["key"].values()) for group in groups for entry in group["rollouts"]}
        kept = [each.trajectory for each in scored if key_of(each.trajectory) in in_groups]
        branches = [trajectory for trajectory in kept if trajectory.parent is not None]
        assert branches
        assert all(key_of_key(branch.parent) in in_groups and branch.forked_at > 0 for branch in branches)
        assert line["branching/branches_per_task"] == pytest.approx(len(branches) / 3)
        assert line["branching/branches_per_task"] + line["branching/fresh_per_task"] == pytest.approx(3)


def test_a_branch_that_was_given_up_is_in_the_ledger_and_in_the_metrics(finished):
    for step in (1, 2):
        (line,) = [line for line in read_lines(finished.run.metrics) if (line["stage"], line["step"]) == ("rl", step)]
        path = finished.run.stage("rl").rollouts(step)
        ledger = read_lines(path.with_suffix(".ledger.jsonl"))
        displaced = [each for each in ledger if each["event"] == "displaced"]
        assert line["scheduler/branches_displaced"] == len(displaced)
        assert line["scheduler/displaced_tokens"] == sum(each["generated_tokens"] for each in displaced)
        assert line["scheduler/displaced_prefilled_tokens"] == sum(each["prefilled_tokens"] for each in displaced)
        begun = [as_tuple(each["key"]) for each in ledger if each["event"] == "started"]
        groups = json.loads(finished.run.stage("rl").selection(step).read_text())["groups"]
        kept = [as_tuple(entry["key"]) for group in groups for entry in group["rollouts"]]
        assert sorted(begun) == sorted([*kept, *(as_tuple(each["key"]) for each in displaced)])


def test_rollouts_with_a_forced_end_are_read_and_resumed(tmp_path):
    prompt = tmp_path / "tags.toml"
    prompt.write_text('source = "test"\ncalls = "tags"\n\n[[messages]]\nrole = "user"\ncontent = "{question}"\n')

    def say(conversation, draw):
        expression = re.search(r"\d+\+\d+", conversation)[0]
        return f"<python>print({expression})</python>" if draw.random() < 0.7 else answer(7)

    def stops_at_tags(policy, **options):
        def stopped(request):
            *said, end = policy(request)
            is_call = request.stop_strings and chat.decode(said).endswith("</python>")
            return said if is_call else [*said, end]

        return RecordingEngine(stopped, **options)

    recipe = make_recipe(
        method="arpo",
        branching={"initial_rollouts": 3, "base_probability": 0.9},
        limits={"max_calls": 1, "forced_eos": True},
        prompt=str(prompt),
    )
    chat = load_chat(run_recipe(tmp_path / "whole", until="sft").run.stage("sft").model)
    words = {"say": say, "make_engine": stops_at_tags, "until": "rl"}
    whole = run_recipe(tmp_path / "whole", recipe, **words).run
    with falling("rl", before=1):
        run_recipe(tmp_path / "fallen", recipe, **words)
    resumed = run_recipe(tmp_path / "fallen", recipe, **words).run
    for step in (1, 2):
        rollouts, again = (
            {each.trajectory.key: each.trajectory for each in read_rollouts(run.stage("rl").rollouts(step))}
            for run in (whole, resumed)
        )
        at_limit = [each for each in rollouts.values() if each.stop_reason is StopReason.TOOL_BUDGET]
        assert at_limit
        assert all((each.ids[-1], each.loss_mask[-1]) == (chat.end_of_turn_id, False) for each in at_limit)
        assert {key: each.ids for key, each in rollouts.items()} == {key: each.ids for key, each in again.items()}
    assert_same_training(resumed, whole)


def test_aepo_and_tree_grpo_run_as_settings_of_the_same_tree(tmp_path):
    """Every rollout that began is in a group, or was given up, or had the tokens of another one."""
    method = {"kind": "arpo", "advantage": "tree", "loss": "stop_gradient_clip", "entropy_advantage": 0.2}
    branching = {"initial_rollouts": 3, "monitoring_weight": 0.5, "branch_penalty": 0.05}
    branching |= {"base_probability": 0.9, "spread_budget": True, "replace_identical": True}
    run = run_recipe(tmp_path / "run", make_recipe(method=method, branching=branching)).run
    for step, line in enumerate(lines_of(run), start=1):
        rollouts = run.stage("rl").rollouts(step)
        ledger = read_lines(rollouts.with_suffix(".ledger.jsonl"))
        groups = json.loads(run.stage("rl").selection(step).read_text())["groups"]
        assert [len(group["rollouts"]) for group in groups] == [6, 6, 6]
        replaced = [each for each in ledger if each["event"] == "replaced"]
        assert line["branching/replaced"] == len(replaced)
        left = [as_tuple(each["key"]) for each in ledger if each["event"] in ("displaced", "replaced")]
        kept = [as_tuple(entry["key"]) for group in groups for entry in group["rollouts"]]
        begun = {as_tuple(each["key"]) for each in ledger if each["event"] == "started"}
        assert begun == {*kept, *left}
        assert line["branching/branches_per_task"] > 0


def as_tuple(key):
    return key["task_index"], key["attempt"], key["branch"]


def key_of_key(key):
    return key.task_index, key.attempt, key.branch


def key_of(trajectory):
    return key_of_key(trajectory.key)
