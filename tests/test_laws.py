"""The laws of docs/architecture.md, each with the tests that hold it. Some stand here, the others are named here."""

import asyncio
import itertools
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from importlib.metadata import requires
from pathlib import Path

import pytest
from pydantic import TypeAdapter

from faulty_sandbox import FaultySandbox
from scripted_runs import Watching, answer, call, make_recipe, run_recipe, sums_and_errors, untimed
from strop.algorithms.grpo import GRPO
from strop.algorithms.method import Column
from strop.engine.config import EngineConfig
from strop.engine.torch.engine import TorchEngine
from strop.errors import CannotLearnError, WeightsNotProven
from strop.rewards import make_reward
from strop.rollout.environment import RolloutLimits, ToolEnvironments
from strop.rollout.player import Judge, NullObserver, Player, collect
from strop.rollout.prompt import load_prompt
from strop.run_directory import StageDirectory, packed, read_lines, write_directory
from strop.sandbox.scripted import ScriptedSandbox
from strop.stages.context import load_chat
from strop.stages.conversations import as_demonstration
from strop.stages.evaluation import Eval
from strop.stages.loop import checkpoints
from strop.stages.loop.ledger import StepLedger, read_rollouts
from strop.tasks import make_tasks
from strop.tools.python import PythonTool
from strop.training.batch import pack
from strop.training.config import TrainerConfig
from strop.training.trainer import Trainer
from strop.types import Trajectory

TESTS = Path(__file__).parent
_TRAJECTORY = TypeAdapter(Trajectory)

TESTS_OF = {
    "tokens are the truth": ["rollout/test_collect.py::test_a_rollout_of_several_turns_appends_and_never_exceeds_its_budget"],
    "masks come from provenance": [
        "training/test_batch.py::test_only_tokens_that_the_policy_sampled_are_trained_on",
        "training/test_sft.py::test_only_a_demonstrators_turns_are_imitated",
        "training/test_trainer.py::test_what_masked_positions_hold_changes_neither_loss_nor_gradient",
    ],
    "outcomes are typed": [
        "rollout/test_collect.py::test_a_tool_that_stays_broken_voids_the_rollout_and_another_attempt_takes_its_place",
        "rollout/test_collect.py::test_a_group_whose_every_rollout_is_void_is_empty_and_stops_being_refilled",
        "rollout/test_collect.py::test_a_judge_that_is_lost_voids_the_rollout_instead_of_scoring_it_0",
    ],
    "the gradient does not depend on the plumbing": [
        "training/test_trainer.py::test_micro_batch_size_changes_the_gradient_by_rounding_only",
        "training/test_trainer.py::test_nothing_of_the_plumbing_changes_the_gradient_but_by_rounding",
        "training/test_workers.py::test_two_ranks_give_the_gradient_of_one_by_rounding_only",
        "training/test_batch.py::test_rows_stand_in_canonical_order_whatever_closed_first",
    ],
    "one definition of log-prob": [
        "training/test_logprobs.py::test_chunked_logprobs_entropies_and_gradients_equal_the_full_forward",
        "engine/test_logprobs.py::test_logprobs_and_entropies_are_those_of_the_model_librarys_full_forward",
    ],
    "published weights are the weights that sample": [
        "training/test_trainer.py::test_what_is_published_matches_its_checksum_in_the_engines_dtype",
        "engine/test_torch_engine.py::test_a_weight_that_was_perturbed_by_a_thousandth_is_noticed_at_the_next_request",
        "engine/test_contract.py::test_a_publication_drops_every_cache_of_the_older_weights",
    ],
    "everything that waits has a deadline": [
        "rollout/test_collect.py::test_a_void_rollout_names_who_waited_too_long_and_for_what",
        "rollout/scheduling/test_slow_completions.py::test_an_engine_that_hangs_is_lost_and_its_rollouts_continue_elsewhere",
        "training/test_trainer.py::test_the_event_loop_runs_on_while_the_trainer_computes",
    ],
    "seeds belong to work items": [
        "rollout/test_collect.py::test_the_seed_of_a_rollout_depends_on_batch_and_key_alone",
        "training/test_trainer.py::test_two_trainers_of_one_seed_are_equal_bit_for_bit",
        "engine/test_determinism.py::test_bits_depend_neither_on_company_nor_on_order_nor_on_slots",
    ],
    "a checkpoint is atomic and layout-free": [
        "training/test_trainer.py::test_a_loaded_trainer_goes_on_as_the_saved_one_would_have_bit_for_bit",
        "rollout/test_collect.py::test_finished_rollouts_of_an_interrupted_batch_are_not_played_again",
        "pipelines/test_resume.py::test_a_kill_among_open_tool_calls_changes_nothing",
        "pipelines/test_resume.py::test_a_run_that_is_killed_in_every_stage_ends_the_same",
        "pipelines/test_end_to_end.py::test_a_step_counts_once_whether_it_fell_before_or_after_its_checkpoint",
    ],
    "the core is light": ["test_laws.py::test_nothing_but_the_core_is_required"],
    "a run that cannot learn says so": ["test_laws.py::test_a_run_that_cannot_learn_says_so_within_a_step_and_gives_up"],
}


@pytest.mark.parametrize("law", TESTS_OF)
def test_every_law_has_tests(law):
    assert TESTS_OF[law]
    for place in TESTS_OF[law]:
        file, name = place.split("::")
        assert f"def {name}(" in (TESTS / file).read_text(), place


def trajectories(run, stage="rl", steps=(1, 2)):
    return [scored.trajectory for step in steps for scored in read_rollouts(run.stage(stage).rollouts(step))]


def test_a_trajectory_is_what_the_engine_was_fed_and_what_it_sampled_and_nothing_is_encoded_again(scripted_run):
    engine = scripted_run.engines[1]
    turns_of = defaultdict(list)
    for request, completion in engine.answers.values():
        conversation, _, turn = request.id.rpartition("/")
        turns_of[conversation].append((int(turn), request, completion))
    ended = set()
    for turns in turns_of.values():
        turns.sort(key=lambda each: each[0])
        for (_, earlier, completion), (_, later, _) in itertools.pairwise(turns):
            so_far = earlier.ids + completion.ids
            assert later.ids[: len(so_far)] == so_far
            assert (later.extends, later.at) == (earlier.id, len(so_far))
        _, last, completion = turns[-1]
        ended.add(last.ids + completion.ids)
    assert {tuple(trajectory.ids) for trajectory in trajectories(scripted_run.run)} == ended
    assert any(len(turns) > 1 for turns in turns_of.values())


def test_in_rl_the_mask_is_on_what_was_sampled_and_in_sft_on_the_demonstrators_turns(scripted_run):
    for trajectory in trajectories(scripted_run.run):
        sampled = [token for turn in trajectory.turns for token in turn.completion.ids]
        assert [token for token, is_on in zip(trajectory.ids, trajectory.loss_mask, strict=True) if is_on] == sampled
    chat = load_chat(scripted_run.run.stage("base").model)
    lines = read_lines(scripted_run.run.stage("sft").path / "data" / "demonstrations.jsonl")
    segments = [
        segment for line in lines for segment in as_demonstration(_TRAJECTORY.validate_python(line["trajectory"])).segments
    ]
    spoken = [chat.decode(segment.ids) for segment in segments if segment.is_demonstrator]
    fed = [chat.decode(segment.ids) for segment in segments if not segment.is_demonstrator]
    assert all(text.startswith("<reason>") and text.endswith("<|im_end|>") for text in spoken)
    assert not any("<tool_response>" in text or "<|im_start|>" in text for text in spoken)
    assert any("<tool_response>" in text for text in fed)


def test_a_faulty_sandbox_costs_rollouts_but_never_a_reward_of_0(tmp_path):
    """Answers are right whenever the tool answers, so every reward that counts is 1, however many calls break."""

    def always_calls(conversation, draw):
        output = re.search(r"<tool_response>\n(\d+)", conversation)
        return answer(output[1]) if output else call(f"print({re.search(r'[0-9]+[+][0-9]+', conversation)[0]})")

    faulty = FaultyInRl()
    run_recipe(tmp_path / "run", make_recipe(give_up_after=1, steps=1), say=always_calls, runner=faulty, progress=faulty)
    (line,) = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["stage"] == "rl"]
    assert 0 < line["rollout/void_fraction"] < 1
    assert line["rollout/accuracy"] == 1.0
    assert line["rollout/reward_mean"] == 1.0
    assert line["rollout/tool_error_rate"] == 0.0


class FaultyInRl(Watching):
    """A runner that watches its run, and is faultless outside the RL stage. What failed once fails whenever retried."""

    def stage_started(self, name, kind, total_steps, done_steps):
        self.sandbox = FaultySandbox(answer=sums_and_errors, fault_rate=0.5 if name == "rl" else 0.0)

    async def run(self, request):
        return await self.sandbox.run(request)


def test_the_sampler_and_the_trainer_agree_on_every_logprob_at_temperature_0_7(scripted_run):
    model = scripted_run.run.stage("rl").model
    stage = make_recipe().stages["after"]
    assert isinstance(stage, Eval)
    stage = stage.config
    stage = stage.model_copy(update={"sampling": stage.sampling.model_copy(update={"temperature": 0.7, "max_tokens": 60})})
    chat = load_chat(model)

    async def gaps():
        engine = TorchEngine.from_directory(model, EngineConfig(slots=8, max_length=256, device="cpu"), detokenize=chat.decode)
        reward = make_reward(stage.reward)
        trainer = Trainer.from_directory(model, TrainerConfig())
        try:
            tool = PythonTool(ScriptedSandbox(answer=sums_and_errors))
            environments = ToolEnvironments(chat, load_prompt(stage.prompt), [tool], stage.limits)
            player = Player(
                engine=engine,
                environments=environments,
                judge=Judge(reward=reward, weights=stage.reward.weights),
                sampling=stage.sampling,
                stop_ids=chat.stop_ids,
                stop_strings=environments.stop_strings,
            )
            tasks = make_tasks(stage.tasks, seed=1, split="test")
            playing = collect(
                [(0, tasks.task(0)), (1, tasks.task(1))], player, num_rollouts=4, seed=2, observer=NullObserver(), finished={}
            )
            method = GRPO()
            selections = [method.select(group, group_size=4, seed=0) async for group in playing]
            advantages = method.advantages(selections)
            batch = pack(selections, advantages, aggregation=method.aggregation, temperature=0.7, constant=None)
            batch = await trainer.score(batch, Column.OLD_LOGPROBS)
            return (batch.columns[Column.OLD_LOGPROBS] - batch.sampled_logprobs)[batch.loss_mask].abs()
        finally:
            await engine.close()
            await reward.close()
            await trainer.close()

    found = asyncio.run(gaps())
    assert len(found) > 100
    assert found.max() < 1e-4  # nats


def test_an_engine_that_holds_other_weights_than_were_published_stops_the_run(tmp_path):
    with pytest.raises(WeightsNotProven, match="version 0 was published"):
        run_recipe(tmp_path / "run", engine_options={"has_wrong_weights": True})


def test_rollouts_of_other_weights_are_not_reused(scripted_run, tmp_path):
    rollouts = scripted_run.run.stage("rl").rollouts(1)
    (weights,) = {each for line in read_lines(rollouts) for each in line["weights"].values()}
    copy = tmp_path / rollouts.name
    shutil.copy(packed(rollouts), packed(copy))
    for checksum, num_reused in ((weights, 18), ("0" * 32, 0)):
        ledger = StepLedger(copy, weights=checksum, published={0: checksum})
        ledger.close()
        assert len(ledger.finished_before) == num_reused


def test_every_stage_of_a_rollout_has_a_deadline_by_default():
    assert RolloutLimits().deadline_s > 0
    assert EngineConfig().stall_timeout_s > 0
    assert make_recipe().stages["rl"].config.reward.config.verify_deadline_s > 0


def test_one_seed_gives_one_run_whatever_order_things_arrive_in(scripted_run, tmp_path):
    twin = run_recipe(tmp_path / "twin", is_fresh=True).run
    mine, theirs = ([untimed(line) for line in read_lines(run.metrics)] for run in (twin, scripted_run.run))
    assert mine == theirs
    for stage in ("base", "sft", "rl"):
        of_both = [run.stage(stage).model / "model.safetensors" for run in (twin, scripted_run.run)]
        assert of_both[0].read_bytes() == of_both[1].read_bytes()
    orders = [[s.trajectory.key for s in read_rollouts(run.stage("rl").rollouts(1))] for run in (twin, scripted_run.run)]
    assert sorted(orders[0]) == sorted(orders[1])
    assert orders[0] != orders[1]  # 18 conversations of random latency


def test_another_seed_gives_another_run(scripted_run, tmp_path):
    other = run_recipe(tmp_path / "other", make_recipe().model_copy(update={"seed": 1})).run
    assert untimed(read_lines(other.metrics)[0]) != untimed(read_lines(scripted_run.run.metrics)[0])


def test_a_directory_is_there_whole_or_not_at_all(tmp_path):
    def half(directory):
        (directory / "model").write_text("half")
        raise RuntimeError("a fall")

    def whole(directory):
        (directory / "model").write_text("whole")

    path = StageDirectory(tmp_path).checkpoint(3)
    with pytest.raises(RuntimeError):
        write_directory(path, half)
    assert checkpoints.latest_step(StageDirectory(tmp_path)) == 0
    write_directory(path, whole)
    with pytest.raises(RuntimeError):
        write_directory(path, half)
    assert (path / "model").read_text() == "whole"
    (path.parent / ".step-000004.0a1b.tmp").mkdir()  # what a kill leaves
    assert checkpoints.latest_step(StageDirectory(tmp_path)) == 3
    assert [entry.name for entry in path.parent.iterdir() if not entry.name.startswith(".")] == ["step-000003"]


def test_the_command_line_starts_without_torch():
    program = "import sys, strop.cli; sys.exit(' '.join({'torch', 'transformers', 'numpy'} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_nothing_but_the_core_is_required():
    core = {re.split(r"[^A-Za-z0-9-]", line)[0] for line in requires("strop") if "extra ==" not in line}
    assert core <= {
        "torch",
        "transformers",
        "tokenizers",
        "safetensors",
        "numpy",
        "pydantic",
        "typer",
        "rich",
        "httpx2",
        "jinja2",
        "math-verify",
        "jsonschema",
        "scipy",
    }


@pytest.mark.parametrize(
    ("say", "message"),
    [
        (lambda conversation, draw: answer("none"), "every group is tied: all 18 rewards are 0."),
        (
            lambda conversation, draw: (
                call("prnt(1)") if "<tool_response>" not in conversation else answer(draw.choice(_sum_or_0(conversation)))
            ),
            "every one of 18 tool calls failed; the last said \"NameError: name 'prnt' is not defined",
        ),
    ],
    ids=["all groups tied", "every tool call failing"],
)
def test_a_run_that_cannot_learn_says_so_within_a_step_and_gives_up(tmp_path, say, message):
    progress = Watching()
    recipe = make_recipe(steps=5, give_up_after=3)
    with pytest.raises(CannotLearnError, match="3 steps in a row could not learn") as told:
        run_recipe(tmp_path / "run", recipe, say=say, progress=progress)
    assert progress.warnings[0].startswith(f"step 1 cannot learn: {message}")
    assert "Try easier tasks" in str(told.value)
    stuck = [line["update/stuck_steps"] for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["stage"] == "rl"]
    assert stuck == [1, 2, 3]


def _sum_or_0(conversation):
    left, right = re.search(r"(\d+)\+(\d+)", conversation).groups()
    return [str(int(left) + int(right)), "0"]


def test_a_killed_run_gives_up_where_an_undisturbed_one_would(tmp_path, monkeypatch):
    """Two steps without learning, a kill, and the third step is the last."""
    save = checkpoints.CheckpointWriter.save

    async def fall(writer, step):
        await save(writer, step)
        await writer.settle()
        if writer.context.name == "rl" and step == 2:
            raise KeyboardInterrupt

    recipe = make_recipe(steps=5, give_up_after=3)
    monkeypatch.setattr(checkpoints.CheckpointWriter, "save", fall)
    with pytest.raises(KeyboardInterrupt):
        run_recipe(tmp_path / "run", recipe, say=lambda conversation, draw: answer("none"))
    monkeypatch.undo()
    with pytest.raises(CannotLearnError, match="3 steps in a row could not learn; of step 3"):
        run_recipe(tmp_path / "run", recipe, say=lambda conversation, draw: answer("none"))
