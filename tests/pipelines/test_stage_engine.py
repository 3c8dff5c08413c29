"""A stage may have an engine of its own: its keys are put over those of the recipe's engine."""

import asyncio
import itertools
import json

import pytest

from engine.servers.fake_vllm import FakeVllm
from faulty_sandbox import FaultySandbox
from scripted_runs import RECIPE, RecordingEngine, make_recipe, recipe_of, run_recipe, sums_and_errors
from strop.errors import ConfigError
from strop.pipeline.plan import plan
from strop.pipeline.run import train
from strop.recipe.recipe import resolve
from strop.reports.trackers import Progress
from strop.runs.lineage import stage_keys
from strop.runs.manifest import differences
from strop.training.trainer import Trainer

STAGES = {name: RECIPE["stages"][name] for name in ("base", "sft", "before", "rl")}


def stages(**engine):
    return STAGES | {"before": STAGES["before"] | {"engine": engine}}


def test_keys_of_a_stage_are_put_over_the_recipes():
    recipe = recipe_of(stages(slots=7), engine={"max_length": 300, "slots": 3})
    own, shared = recipe.for_stage("before").engine, recipe.for_stage("rl").engine
    assert (own.slots, own.max_length) == (7, 300)
    assert (shared.slots, shared.max_length) == (3, 300)
    assert recipe.stages["rl"].config.engine is None


def test_another_kind_of_engine_takes_none_of_the_recipes_keys_and_corrects_only_its_stage():
    server = {"kind": "vllm", "addresses": ["http://127.0.0.1:8000"], "max_length": 300}
    recipe = recipe_of(STAGES | {"rl": STAGES["rl"] | {"engine": server}}, engine={"max_length": 256, "slots": 3})
    assert recipe.for_stage("rl").engine.kind == "vllm"
    assert recipe.stages["rl"].config.method.config.mismatch == "truncate_token"
    assert recipe.for_stage("before").engine.kind == "torch"


def test_a_stage_samples_with_its_own_engine(tmp_path):
    played = run_recipe(tmp_path / "run", recipe_of(stages(replicas=3)), until="before")
    assert len(played.engines) == 3
    manifest = json.loads(played.run.manifest.read_text())
    assert manifest["recipe"]["stages"]["before"]["engine"]["replicas"] == 3


def test_a_response_that_its_own_engine_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match=r"stages.before.sampling.max_tokens is \d+, but the engine holds .* = 16 tokens"):
        plan(recipe_of(stages(max_length=16)))


def test_memory_and_time_of_a_stage_follow_its_own_engine():
    small, large = ({each.name: each.memory_mib for each in plan(recipe_of(stages(slots=num)))} for num in (1, 4096))
    assert large["rl"] == small["rl"]
    assert large["before"] > small["before"]


def test_slots_of_a_stage_change_no_result_and_its_length_does():
    here, there = (json.loads(recipe_of(stages(slots=num)).model_dump_json()) for num in (2, 3))
    assert differences(here, there) == []
    longer = json.loads(recipe_of(stages(slots=2, max_length=999)).model_dump_json())
    assert [key for key, *_ in differences(here, longer)] == ["stages.before.engine.max_length"]


def test_a_stage_does_not_become_stale_by_slots_of_its_own():
    plain, own, longer = recipe_of(STAGES), recipe_of(stages(slots=9)), recipe_of(stages(max_length=999))
    assert stage_keys(plain, "before") == stage_keys(own, "before")
    assert stage_keys(plain, "before") != stage_keys(longer, "before")
    assert stage_keys(plain, "rl") == stage_keys(longer, "rl")


def test_a_penalty_that_sglang_may_ignore_is_refused():
    server = {"kind": "sglang", "addresses": ["http://127.0.0.1:8000"], "max_length": 300}
    table = STAGES["before"] | {"engine": server, "sampling": {"repetition_penalty": 1.1}}
    with pytest.raises(ConfigError, match=r"stages.before.sampling.repetition_penalty is 1.1, which releases of SGLang"):
        plan(recipe_of(STAGES | {"before": table}))


def test_a_limit_of_a_tool_that_is_not_there_is_found_before_anything_is_run():
    table = STAGES["before"] | {"limits": {"max_calls_per_tool": {"pyhton": 3}}}
    with pytest.raises(ConfigError, match=r"stages.before.limits.*no tool 'pyhton'. Did you mean 'python'\? Tools: python"):
        plan(recipe_of(STAGES | {"before": table}))


def test_the_table_is_merged_before_it_is_validated():
    tree = resolve({"engine": {"dtype": "bfloat16"}, "stages": {"a": {"kind": "eval", "engine": {"slots": 2}}}})
    assert tree["stages"]["a"]["engine"] == {"dtype": "bfloat16", "slots": 2}


@pytest.mark.parametrize("is_apart", [False, True])
def test_an_engine_in_the_trainers_process_sleeps_during_an_update(is_apart, tmp_path, monkeypatch):
    calls, update = [], Trainer.update

    class Sleeping(RecordingEngine):
        async def sleep(self):
            calls.append("sleep")

        async def load_weights(self, publication):
            await super().load_weights(publication)
            calls.append(f"publish {publication.version}")

    async def noted(*arguments):
        calls.append("update")
        return await update(*arguments)

    monkeypatch.setattr(Trainer, "update", noted)
    run_recipe(tmp_path / "run", make_recipe(), until="sft")
    calls.clear()
    recipe = recipe_of(STAGES, engine={"max_length": 256, "own_process": is_apart})
    run_recipe(tmp_path / "run", recipe, until="rl", make_engine=Sleeping)
    calls = [call for call, _ in itertools.groupby(calls)]
    step = ["update"] if is_apart else ["sleep", "update"]
    assert calls == ["publish 0", *step, "publish 1", *step, "publish 2"]


@pytest.mark.parametrize("kind", ["rl", "expert_iteration"])
def test_a_server_on_the_trainers_gpus_sleeps_from_the_last_rollout_of_a_step_to_its_publication(kind, tmp_path, monkeypatch):
    """Against a double: vLLM's CPU build has no sleep mode."""
    run_recipe(tmp_path / "run", make_recipe(), until="before")
    fake = FakeVllm(settings={"max_model_len": 256, "enable_sleep_mode": True}, num_blocks=200)
    publication = Trainer.publication

    async def noted(trainer, dtype, *, version):
        fake.calls.append("publish")
        return await publication(trainer, dtype, version=version)

    def computing(call):
        async def computed(*arguments):
            assert fake.asleep == {"weights", "kv_cache"}
            return await call(*arguments)

        return computed

    monkeypatch.setattr(Trainer, "publication", noted)
    for name in ("score", "update"):
        monkeypatch.setattr(Trainer, name, computing(getattr(Trainer, name)))
    stage = {key: value for key, value in RECIPE["stages"]["rl"].items() if kind == "rl" or key != "method"}

    async def scenario():
        async with fake.serve() as address:
            server = {"kind": "vllm", "addresses": [address], "max_length": 256, "slots": 18, "sleep": True}
            recipe = recipe_of(STAGES | {"rl": stage | {"kind": kind, "engine": server}})
            await train(
                recipe, tmp_path / "run", progress=Progress(), runner=FaultySandbox(answer=sums_and_errors), only=("rl",)
            )

    asyncio.run(scenario())
    published = ["pause abort", "update", "reset"]
    begun = [*published, "resume", "publish", *published, "resume"]  # at the opening, and before the first step
    step = ["sleep 2", "publish", "wake weights", *published, "wake kv_cache", "resume"]
    assert fake.calls == [*begun, *step, *step]
