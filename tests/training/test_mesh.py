"""Four ranks in groups: of those that hold a copy of the weights, and of those that divide the tokens of a micro-batch. And two
ranks that read their parts of every model.

Run as a program, this file is the ranks: processes that find each other over gloo, as those of `trainer.workers` do.
"""

import multiprocessing
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors import safe_open

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation
from strop.algorithms.method import Column
from strop.algorithms.ppo import PPO
from strop.engine.model_directory import shapes_of
from strop.errors import ModelError
from strop.rewards.reward_model import begin_reward_model, head_of
from strop.training import assembly, roles
from strop.training.assembly import LearnerOptions, open_learner
from strop.training.batch import Row, World, pack_rows
from strop.training.config import CriticConfig, CriticOptimizerConfig, LoraConfig, OptimizerConfig, TrainerConfig
from strop.training.workers import Rank

pytestmark = pytest.mark.timeout(300)  # on a machine with two processors, each of the ranks waits for the others

METHOD = GRPO(kl_coefficient=0.1, ratio="sequence")  # a loss of a token depends on those of its row
# With so large an eps AdamW's first step is 100 times the gradient, so that weights tell it to 1e-6.
TELLING = {"lr": 1e8, "eps": 1e6, "grad_clip": 0.0}
NUM_RANKS = 4


def tree(seed):
    """Rows of three groups that share beginnings at two depths, in 8 micro-batches of different lengths; one row is short."""
    generator = torch.Generator().manual_seed(seed)

    def draw(number):
        return torch.randint(0, 61, (number,), generator=generator).tolist()

    rows = []
    for group in range(3):
        prompt = draw(20)
        trunks = [prompt + draw(17 + 3 * group), prompt]
        for number, trunk in enumerate([*trunks, trunks[0]]):
            ids = trunk + draw(9 + 7 * number)
            mask = [position >= 20 and position % 5 > 0 for position in range(len(ids))]
            advantages = torch.randn(len(ids), generator=generator)
            rows.append(Row(ids=ids, loss_mask=mask, advantages=advantages, sampled_logprobs=[-4.0] * len(ids), group=group))
    return pack_rows(rows, aggregation=Aggregation.GROUP_TOKEN_MEAN, temperature=0.7)


def step(learner, seed):
    """An update that two epochs later would make: the old log-probs are not those of the weights."""
    batch = tree(seed)
    for column in (Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS):
        batch = replace(batch, columns={**batch.columns, column: learner.score(batch, column)})
    noise = 0.4 * torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(seed))
    shifted = {**batch.columns, Column.OLD_LOGPROBS: batch.columns[Column.OLD_LOGPROBS] + noise * batch.loss_mask}
    report = learner.update(replace(batch, columns=shifted), METHOD.token_loss, METHOD.token_statistics)
    return replace(report, cost=None), batch.columns


def weights_of(learner):
    return {name: learner.tensor(name).clone() for name in learner.names()}


def whole_weights(weights):
    return {name: weights.whole(name).clone() for name in weights.names()}


def life(learner, directory):
    """What a rank finds as it loads, publishes, trains, saves and resumes."""
    rank = learner.world.rank
    published = directory / f"published-{rank}"
    published.mkdir(parents=True)
    found = {"at first": weights_of(learner), "parts": local_elements(learner)}
    of_ranks = [directory / f"published-{each}" for each in range(learner.world.size)]
    found["checksums"] = [learner.checksum(torch.float32), learner.write_published(of_ranks, torch.float32)]
    found["tokens"] = tokens_of_layers(learner)
    found["first"] = step(learner, 0)
    found["weights"] = weights_of(learner)
    learner.snapshot().write(directory / "checkpoint")
    found["second"], found["later"] = step(learner, 1), weights_of(learner)
    learner.load(directory / "checkpoint")
    found["resumed"] = step(learner, 1), weights_of(learner)
    learner.refresh_reference()
    learner.load(directory / "checkpoint")
    found["reference again"] = learner.score(tree(1), Column.REFERENCE_LOGPROBS)
    return found


def critic(learner, directory):
    """What a rank finds as it loads, trains, saves and resumes a critic."""

    def update():
        batch = tree(0)
        values = learner.score(batch, Column.VALUES)
        returns = torch.randn(batch.ids.shape, generator=torch.Generator().manual_seed(0)) * batch.loss_mask
        batch = replace(batch, columns={Column.VALUES: values, Column.RETURNS: returns})
        report = learner.update_critic(batch, PPO().value_loss, PPO().value_statistics)
        return {"report": report, "values": learner.score(batch, Column.VALUES)}

    found = {"at first": whole_weights(learner.critic.weights), **update()}
    learner.snapshot().write(directory / "checkpoint")
    found["second"] = update()
    learner.load(directory / "checkpoint")
    return found | {"resumed": update()}


def local_elements(learner):
    parts = (each.to_local() if hasattr(each, "to_local") else each for each in learner.weights.named().values())
    return sum(part.numel() for part in parts)


def tokens_of_layers(learner):
    """How many tokens go through a layer of this rank while a batch is scored."""
    seen = []
    hook = learner.model.base_model.layers[0].mlp.register_forward_hook(lambda *call: seen.append(call[1][0].shape[1]))
    learner.score(tree(0), Column.OLD_LOGPROBS)
    hook.remove()
    return sum(seen)


def options_of(directory, workers, settings, critic=None):
    keys = {"optimizer": OptimizerConfig(**TELLING), "max_tokens_per_microbatch": 80} | settings
    config = TrainerConfig(workers=workers, device="cpu", **keys)
    has_critic = "critic" in settings
    return LearnerOptions(
        directory=directory,
        config=config,
        reference=None if has_critic else directory,
        critic=(critic or directory) if has_critic else None,
        total_updates=None,
        total_critic_updates=None,
    )


def count_reads(sharded):
    """Count the numbers that this process reads from weight files, which it can only do by slices. Return the counts."""
    counts = []

    @contextmanager
    def opened(path, framework):
        with safe_open(path, framework=framework) as file:
            yield SimpleNamespace(keys=file.keys, get_slice=lambda name: Counted(file.get_slice(name)))

    class Counted:
        def __init__(self, stored):
            self.stored = stored

        def __getitem__(self, rows):
            part = self.stored[rows]
            counts.append(part.numel())
            return part

    def refuse(directory):
        raise AssertionError(f"{directory} is loaded whole")

    sharded.safe_open = opened
    assembly.load_model = assembly.load_reward_model = roles.load_model = refuse
    return counts


def load_whole():
    """Load models as a single process does; ranks divide what is in memory."""
    of_one = assembly._open_model
    assembly._open_model = lambda directory, world, **options: of_one(directory, World(), **options)


def run_rank(number, options, scenario, directory, ports):
    from strop.training import sharded

    num_ranks = options.config.workers
    rank = Rank(options.config, number, "localhost", num_ranks)
    port = rank("listen")
    for _ in range(num_ranks if number == 0 else 0):
        ports.put(port)
    counts = load_whole() if directory.name.startswith("whole") else count_reads(sharded)
    rank("open", options, "localhost", ports.get())
    torch.save(globals()[scenario](rank._learner, directory) | {"counts": counts}, directory / f"found-{number}")
    dist.destroy_process_group()


def on_ranks(directory, jobs):
    """Return what each rank found in each of the jobs (name, options, scenario); of "whole ..." they load whole models."""
    torch.save([(name, options, scenario) for name, options, scenario in jobs], directory / "jobs")
    for name, _, _ in jobs:
        (directory / name).mkdir()
    subprocess.run([sys.executable, __file__, directory], check=True, timeout=600)
    return {
        name: [torch.load(directory / name / f"found-{rank}", weights_only=False) for rank in range(options.config.workers)]
        for name, options, _ in jobs
    }


def main(directory):
    # What each rank would import and compute is there before they are forked, once for all.
    import peft  # noqa: F401
    from transformers import LlamaForCausalLM  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import strop.training.sharded  # noqa: F401

    get_checkpoint_conversion_mapping("llama")
    context = multiprocessing.get_context("fork")  # here no thread has been started yet
    for name, options, scenario in torch.load(directory / "jobs", weights_only=False):
        ports = context.SimpleQueue()
        arguments = (options, scenario, directory / name, ports)
        ranks = [context.Process(target=run_rank, args=(number, *arguments)) for number in range(options.config.workers)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        if any(rank.exitcode for rank in ranks):
            sys.exit(f"{name}: exit codes {[rank.exitcode for rank in ranks]}")


def assert_close(first, second, tolerance):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert (tensor - second[name]).norm() <= tolerance * second[name].norm(), name


def assert_same_step(found, expected, tolerance=1e-5):
    (report, columns), (of_one, columns_of_one) = found, expected
    assert report.loss == pytest.approx(of_one.loss, rel=tolerance)
    assert report.grad_norm == pytest.approx(of_one.grad_norm, rel=tolerance)
    assert report.statistics == pytest.approx(of_one.statistics, rel=tolerance, abs=1e-6)
    for column, scores in columns.items():
        assert torch.allclose(scores, columns_of_one[column], atol=10 * tolerance), column


@pytest.fixture(scope="module")
def alone(model_directory, tmp_path_factory):
    learner = open_learner(options_of(model_directory, 0, {}))
    return life(learner, tmp_path_factory.mktemp("alone")), learner


MESHES = {
    "two copies": {"fsdp_size": 2},
    "two copies, two ranks a row": {"fsdp_size": 2, "sequence_parallel": 2, "activation_checkpointing": True},
}
MORE_MESHES = {
    "a copy each": {"fsdp_size": 1},
    "a copy each, two ranks a row": {"fsdp_size": 1, "sequence_parallel": 2},
    "one copy, two ranks a row": {"sequence_parallel": 2},
}


@pytest.fixture(scope="module")
def meshes(model_directory, tmp_path_factory):
    jobs = [(name, options_of(model_directory, NUM_RANKS, settings), "life") for name, settings in MESHES.items()]
    directory = tmp_path_factory.mktemp("meshes")
    return directory, on_ranks(directory, jobs)


@pytest.fixture(scope="module")
def more_meshes(model_directory, tmp_path_factory):
    jobs = [(name, options_of(model_directory, NUM_RANKS, settings), "life") for name, settings in MORE_MESHES.items()]
    directory = tmp_path_factory.mktemp("more")
    return directory, on_ranks(directory, jobs)


def assert_lives_as_one(directory, of_ranks, alone, settings):
    expected, learner = alone
    size, width = settings.get("fsdp_size", NUM_RANKS), settings.get("sequence_parallel", 1)
    names = expected["at first"].keys()
    for found in of_ranks:
        assert all(torch.equal(found["at first"][name], expected["at first"][name]) for name in names)
        assert set(found["checksums"]) == set(expected["checksums"])
        assert_same_step(found["first"], expected["first"])
        assert_close(found["weights"], expected["weights"], 1e-5)
        again, weights = found["resumed"]
        assert again[0] == found["second"][0]
        assert all(torch.equal(weights[name], of_ranks[0]["later"][name]) for name in names)  # on all copies
    assert sum(found["parts"] for found in of_ranks) == expected["parts"] * NUM_RANKS // size
    for first in range(0, NUM_RANKS, width):
        assert len({found["tokens"] for found in of_ranks[first : first + width]}) == 1
    learner.load(directory / "checkpoint")
    assert_same_step(step(learner, 1), of_ranks[0]["second"])
    assert_close(weights_of(learner), of_ranks[0]["later"], 1e-5)


@pytest.mark.parametrize("name", MESHES)
def test_four_ranks_in_groups_load_publish_train_and_resume_as_one_does(meshes, alone, name):
    directory, found = meshes
    assert_lives_as_one(directory / name, found[name], alone, MESHES[name])


def test_ranks_that_divide_rows_compute_each_token_once(meshes, alone):
    _, found = meshes
    for name in MESHES:
        assert sum(each["tokens"] for each in found[name]) == pytest.approx(alone[0]["tokens"], rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_MESHES)
def test_other_meshes_do_as_one_rank_does(more_meshes, alone, name):
    directory, found = more_meshes
    assert_lives_as_one(directory / name, found[name], alone, MORE_MESHES[name])


@pytest.mark.slow
def test_ranks_that_divide_rows_train_in_bfloat16_an_adapter_and_a_critic(model_directory, tmp_path):
    of_critic = CriticConfig(optimizer=CriticOptimizerConfig(**TELLING))
    settings = {
        "bfloat16": ({"precision": "bfloat16"}, "life", 5e-2),
        "adapter": ({"lora": LoraConfig(rank=4)}, "life", 1e-4),
        "critic": ({"critic": of_critic}, "critic", 1e-4),
    }
    mesh = {"fsdp_size": 2, "sequence_parallel": 2}
    jobs = [(name, options_of(model_directory, NUM_RANKS, keys | mesh), what) for name, (keys, what, _) in settings.items()]
    found = on_ranks(tmp_path, jobs)
    for name, (keys, what, tolerance) in settings.items():
        expected = globals()[what](open_learner(options_of(model_directory, 0, keys)), tmp_path / name / "alone")
        if what == "life":
            assert_same_step(found[name][3]["first"], expected["first"], tolerance)
            assert_close(found[name][3]["weights"], expected["weights"], tolerance)
        else:
            assert found[name][3]["report"].loss == pytest.approx(expected["report"].loss, rel=tolerance)
            assert expected["values"].any()
            assert_close({"values": found[name][3]["values"]}, {"values": expected["values"]}, tolerance)


OF_CRITIC = {"critic": CriticConfig(optimizer=CriticOptimizerConfig(lr=1e-2))}
LOADS = {"adapter": {"lora": LoraConfig(rank=4)}, "critic with a head": OF_CRITIC}
ROUNDED = {"precision": "bfloat16", "activation_checkpointing": True}
MORE_LOADS = {
    "policy and reference": {},
    "policy and reference in bfloat16": ROUNDED,
    "adapter in bfloat16": LOADS["adapter"] | ROUNDED,
    "critic without a head": OF_CRITIC,
    "critic with a head in bfloat16": OF_CRITIC | ROUNDED,
}


@pytest.fixture(scope="module")
def reward_model_directory(model_directory, tmp_path_factory):
    directory = tmp_path_factory.mktemp("reward-model")
    reward_model = begin_reward_model(model_directory, pad_id=0)
    torch.nn.init.normal_(head_of(reward_model), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():  # a decoder that is not the policy's
        reward_model.base_model.norm.weight.mul_(1.5)
    reward_model.save_pretrained(directory)
    return directory


def load_in_both_ways(settings_by_name, model, reward_model, directory):
    """Return options, and what two ranks find that read their parts and that load whole models, by name."""
    jobs = {}
    for name, settings in settings_by_name.items():
        options = options_of(model, 2, settings, reward_model if "with a head" in name else model)
        jobs |= {f"{way}{name}": (options, "critic" if "critic" in name else "life") for way in ("", "whole ")}
    found = on_ranks(directory, [(name, *job) for name, job in jobs.items()])
    return {name: (jobs[name][0], found[name], found[f"whole {name}"]) for name in settings_by_name}


@pytest.fixture(scope="module")
def loads(model_directory, reward_model_directory, tmp_path_factory):
    return load_in_both_ways(LOADS, model_directory, reward_model_directory, tmp_path_factory.mktemp("loads"))


@pytest.fixture(scope="module")
def more_loads(model_directory, reward_model_directory, tmp_path_factory):
    return load_in_both_ways(MORE_LOADS, model_directory, reward_model_directory, tmp_path_factory.mktemp("more-loads"))


def are_equal(first, second):
    if isinstance(first, torch.Tensor):
        return torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(are_equal(first[name], second[name]) for name in first)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(are_equal, first, second))
    return first == second


def assert_loads_as_others_do(options, of_parts, of_whole):
    alone = open_learner(replace(options, config=options.config.model_copy(update={"workers": 0})))
    expected = weights_of(alone) if alone.critic is None else whole_weights(alone.critic.weights)
    for parts, whole in zip(of_parts, of_whole, strict=True):
        assert are_equal(parts | {"counts": None}, whole | {"counts": None})
        assert are_equal(parts["at first"], expected)
        if alone.critic is None:
            assert are_equal(parts["resumed"], (parts["second"], parts["later"]))
            assert are_equal(parts["reference again"], parts["second"][1][Column.REFERENCE_LOGPROBS])
        else:
            assert are_equal(parts["resumed"], parts["second"])


def assert_reads_its_parts(options, of_parts):
    """Each weight is read by one of the ranks that divide it; a reference again when it goes back to what it was."""
    models = [options.directory]
    if options.critic is not None:
        models.append(options.critic)
    elif options.config.lora is None:  # else the reference is the model under the adapter
        models += 2 * [options.reference]
    shapes = [torch.Size(shape) for model in models for shape in shapes_of(model).values()]
    first, second = (sum(found["counts"]) for found in of_parts)
    assert first == sum(-(-shape[0] // 2) * shape[1:].numel() for shape in shapes)
    assert first + second == sum(shape.numel() for shape in shapes)


@pytest.mark.parametrize("name", LOADS)
def test_ranks_read_only_their_parts_and_do_to_the_bit_what_they_do_with_whole_models(loads, name):
    options, of_parts, of_whole = loads[name]
    assert_loads_as_others_do(options, of_parts, of_whole)
    assert_reads_its_parts(options, of_parts)


@pytest.mark.slow
@pytest.mark.parametrize("name", MORE_LOADS)
def test_other_models_are_read_in_parts_and_do_what_whole_ones_do(more_loads, name):
    options, of_parts, of_whole = more_loads[name]
    assert_loads_as_others_do(options, of_parts, of_whole)
    assert_reads_its_parts(options, of_parts)


def test_a_weight_that_the_files_lack_is_named(model_directory, reward_model_directory):
    from strop.training.sharded import read_parts

    for directory, name, shape in (
        (model_directory, "score.weight", (1, 32)),
        (reward_model_directory, "score.weight", (2, 32)),
        (reward_model_directory, "layers.0.mlp.up_proj.weight", (64, 32)),
    ):
        lacking = {name: torch.nn.Parameter(torch.empty(shape))}
        with pytest.raises(ModelError, match=rf"have no {name} of the shape {re.escape(str(shape))}.* set workers = 0"):
            read_parts(lacking, directory)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"workers": 6, "fsdp_size": 4}, r"fsdp_size is 4, which does not divide workers = 6"),
        ({"sequence_parallel": 2}, r"sequence_parallel is 2, which does not divide workers = 0"),
        ({"workers": 2, "sequence_parallel": 2, "packing": False}, r"Set packing = true"),
    ],
)
def test_groups_that_do_not_divide_the_workers_are_refused(keys, message):
    with pytest.raises(ValidationError, match=message):
        TrainerConfig(**keys)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(Path(sys.argv[1]))
