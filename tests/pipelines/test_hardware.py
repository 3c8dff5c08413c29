"""`--dry-run --hardware`: memory, time and layouts on devices that are not here."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from typer.testing import CliRunner

from strop.cli import app
from strop.engine.config import EngineConfig, VllmConfig
from strop.errors import ConfigError, UserError
from strop.pipeline.hardware import Hardware, cost_here, cost_on
from strop.pipeline.plan import plan
from strop.recipe.load import load_recipe
from strop.recipe.stage import Estimate, Model, Sampled, Trained
from strop.stages.loop.checkpoints import CheckpointedKeys
from strop.stages.model import SIZES, _count
from strop.training.config import LoraConfig, TrainerConfig

PRESETS = sorted((Path(__file__).parents[2] / "recipes" / "presets").glob("*.toml"))
GIB = 2**30
MODEL = Model(num_parameters=10**9, num_active=10**9, num_layers=10, hidden_size=1000, kv_values=10_000)
BFLOAT16 = EngineConfig(dtype="bfloat16", slots=8, max_length=1000)
SAMPLED = Sampled(tokens=30 * 100 * 900, steps=30, rollouts=100)


def trained(**keys):
    trainer = TrainerConfig(precision="bfloat16", **keys)
    return Trained(trainer=trainer, tokens=10**9, tokens_of_update=10**6, longest=1000, flops_per_parameter=8)


def device(tmp_path, *, num=1, memory_gb=1000.0):
    """`num` devices of 100 TFLOP/s in bfloat16 and 1 TB/s, as a user describes them."""
    path = tmp_path / "mine.toml"
    path.write_text(f"memory_gb = {memory_gb}\nbfloat16_tflops = 100.0\nfloat32_tflops = 10.0\nbandwidth_tb_s = 1.0\n")
    return Hardware.named(f"{num}x{path}")


def test_memory_and_time_are_those_computed_by_hand(tmp_path):
    """Of one device, with 16 384 tokens in a micro-batch, 8 conversations at once and responses of 300 of 900 tokens."""
    estimate = Estimate(sampled=SAMPLED, trained=trained())
    cost = cost_on(device(tmp_path), "rl", estimate, BFLOAT16, MODEL)
    state, batch = (16e9 + 2e9) / GIB + 1, 16_384 * 1000 * 34 * 10 * 2 / GIB
    weights, kv = 2e9 / GIB + 1, 8 * 1000 * 10_000 * 2 / GIB
    text = "\n".join(cost.lines)
    assert f"1 rank, {state + batch:.1f} GiB each: {state:.1f} of weights, gradients and moments, {batch:.1f} of a" in text
    assert f"1 of 1 device, {weights + kv:.1f} GiB on each: {weights:.1f} of weights, {kv:.1f} of KV" in text
    assert f"device: {state + batch + weights + kv:,.0f} of 931 GiB; disk: 2 checkpoints" not in text  # of a Trained: one
    assert f"device: {state + batch + weights + kv:,.0f} of 931 GiB; disk: 1 checkpoint of 11 GiB" in text
    training_s = 1e9 / 3 * 8 * 1e9 / (0.4 * 100e12)
    full_s = (2e9 + 8 * 300 * 10_000 * 2) / 0.6e12  # for a token of each of 8; the arithmetic takes less
    tail_s = (2e9 + 900 * 10_000 * 2) / 0.6e12
    sampling_s = 30 * 100 * 300 / 8 * full_s + 30 * 600 * tail_s
    assert cost.time_s == pytest.approx(training_s + sampling_s, rel=1e-9)
    assert cost.problem == ""


def test_a_recipe_without_a_layout_is_spread_over_all_devices(tmp_path):
    estimate = Estimate(sampled=SAMPLED, trained=trained())
    one, four = (cost_on(device(tmp_path, num=num), "rl", estimate, BFLOAT16, MODEL) for num in (1, 4))
    assert one.time_s / four.time_s == pytest.approx(4, rel=0.3)  # the longest response of a step takes as long
    assert "--set stages.rl.trainer.workers=4 " in four.lines[-1]
    assert four.lines[-1].endswith("--set stages.rl.engine.replicas=4 --set stages.rl.engine.devices=[0,1,2,3]")
    assert "for this layout" not in "\n".join(one.lines)


def test_steps_that_overlap_have_engines_on_devices_of_their_own(tmp_path):
    estimate = Estimate(sampled=SAMPLED, trained=trained(), overlaps=True)
    four, two = (cost_on(device(tmp_path, num=num), "rl", estimate, BFLOAT16, MODEL).lines[-1] for num in (4, 2))
    assert four.endswith("trainer.workers=2 --set stages.rl.engine.replicas=2 --set stages.rl.engine.devices=[2,3]")
    assert two == "for this layout: --set stages.rl.engine.devices=[1]"
    small = device(tmp_path, num=2, memory_gb=25)  # each fits on one, and both do not
    shared = Estimate(sampled=SAMPLED, trained=trained(max_tokens_per_microbatch=16_384, workers=2))
    assert "2 of 2 devices" in cost_on(small, "rl", shared, BFLOAT16.model_copy(update={"slots": 200}), MODEL).problem


def test_engines_that_sleep_need_their_memory_only_while_the_trainer_has_no_activations(tmp_path):
    estimate = Estimate(sampled=SAMPLED, trained=trained())
    engine = VllmConfig(python=Path("python"), dtype="bfloat16", slots=400, max_length=1000)
    awake, asleep = (
        cost_on(device(tmp_path), "rl", estimate, each, MODEL).lines
        for each in (engine, engine.model_copy(update={"sleep": True}))
    )
    state, batch = (16e9 + 2e9) / GIB + 1, 16_384 * 1000 * 34 * 10 * 2 / GIB
    weights, kv = 2e9 / GIB, 400 * 1000 * 10_000 * 2 / GIB
    sampling, training = state + weights + kv + 1, state + batch + 1
    assert any(f"device: {sampling + batch:,.0f} of 931 GiB; disk" in line for line in awake)
    phases = f"({sampling:,.0f} in sampling, {training:,.0f} in training)"
    assert any(f"device: {max(sampling, training):,.0f} of 931 GiB {phases}; disk" in line for line in asleep)
    small = device(tmp_path, memory_gb=1.05 * max(sampling, training) * GIB / 1e9)
    assert "for this layout" not in str(cost_on(small, "rl", estimate, engine.model_copy(update={"sleep": True}), MODEL).lines)
    assert "for this layout: --set stages.rl.trainer.max_tokens_per_microbatch=" in str(
        cost_on(small, "rl", estimate, engine, MODEL).lines
    )


def test_a_row_longer_than_a_micro_batch_is_counted_whole(tmp_path):
    long = replace(trained(), longest=65_536)
    [line] = [each for each in cost_on(device(tmp_path), "rl", Estimate(trained=long), BFLOAT16, MODEL).lines if "rank" in each]
    assert f"{65_536 * 1000 * 340 * 2 / GIB:.1f} of a micro-batch of 65,536 tokens" in line


def test_too_many_ranks_for_the_devices_are_refused_by_their_number(tmp_path):
    cost = cost_on(device(tmp_path, num=4), "sft", Estimate(trained=trained(workers=8)), BFLOAT16, MODEL)
    assert cost.problem.startswith("does not fit: 8 of 4 devices")


def test_copies_and_divided_rows_are_counted_per_rank(tmp_path):
    keys = {"workers": 8, "fsdp_size": 4, "sequence_parallel": 2}
    cost = cost_on(device(tmp_path, num=8), "sft", Estimate(trained=trained(**keys)), BFLOAT16, MODEL)
    state, batch = 16e9 / 4 / GIB + 1, 16_384 * 1000 * 340 * 2 / 2 / GIB
    assert f"8 ranks, {state + batch:.1f} GiB each: {state:.1f} of weights, gradients and moments" in cost.lines[0]
    assert cost.lines[0].endswith(f"{batch:.1f} of a micro-batch of 16,384 tokens, divided among 2")
    here = cost_here(Estimate(trained=trained(**keys)), BFLOAT16, MODEL, 1e12)
    assert here.memory_mib == pytest.approx(600 + 8 * (state - 1 + batch) * 1024, rel=1e-9)
    for memory_gb, does_fit_with_copies in ((10, True), (4.9, False)):
        small = cost_on(device(tmp_path, num=8, memory_gb=memory_gb), "sft", Estimate(trained=trained(**keys)), BFLOAT16, MODEL)
        assert "It fits with --set stages.sft.trainer." in small.problem
        assert ("--set stages.sft.trainer.fsdp_size=0" in small.problem) != does_fit_with_copies


def test_an_adapter_has_no_copy_of_its_reference_and_a_small_checkpoint(tmp_path):
    keys = CheckpointedKeys(init="base", trainer=TrainerConfig(lora=LoraConfig(rank=8)))
    estimate = Estimate(trained=keys.as_trained(rows=8, longest=1000, num_references=1))
    assert estimate.trained.copies == 1
    assert "checkpoints of adapters" in "\n".join(cost_on(device(tmp_path), "dpo", estimate, BFLOAT16, MODEL).lines)


def test_of_a_mixture_of_experts_some_parameters_compute_a_token():
    keys = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    moe = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "vocab_size": 100}
    model = _count(transformers.AutoConfig.for_model("qwen3_moe", **keys, **moe))
    routed = 2 * 8 * 3 * 64 * 32
    assert model.num_parameters - model.num_active == routed * 6 // 8
    assert model.kv_values == 2 * 2 * 2 * 16


def test_steps_that_overlap_take_as_long_as_the_longer_of_sampling_and_training_on_half_of_the_devices(tmp_path):
    keys = {"sampled": SAMPLED, "trained": trained()}
    both = cost_on(device(tmp_path, num=2), "rl", Estimate(**keys, overlaps=True), BFLOAT16, MODEL)
    alone = [cost_on(device(tmp_path), "x", Estimate(**{key: keys[key]}), BFLOAT16, MODEL).time_s for key in keys]
    assert both.time_s == pytest.approx(max(alone), rel=1e-9)


def test_what_does_not_fit_is_refused_with_the_least_change_that_fits(tmp_path):
    estimate = Estimate(sampled=SAMPLED, trained=trained(workers=4))
    hardware = device(tmp_path, num=4, memory_gb=16)
    cost = cost_on(hardware, "rl", estimate, BFLOAT16, MODEL)
    [needed] = re.findall(r"does not fit: 4 of 4 devices, each with (\d+) of 15 GiB\.", cost.problem)
    assert int(needed) == round(4e9 / GIB + 1 + 16_384 * 1000 * 340 * 2 / GIB + 2e9 / GIB + 1 + 8 * 1000 * 20_000 / GIB)
    assert cost.time_s == 0
    words = dict(each.split("=") for each in re.findall(r"--set stages\.rl\.(\S+=[\d\[\],]+)", cost.problem))
    assert words == {
        "trainer.max_tokens_per_microbatch": "8192",
        "engine.replicas": "4",
        "engine.devices": "[0,1,2,3]",
    }
    again = Estimate(sampled=SAMPLED, trained=trained(workers=4, max_tokens_per_microbatch=8192))
    engine = BFLOAT16.model_copy(update={"replicas": 4})
    assert cost_on(hardware, "rl", again, engine, MODEL).problem == ""


def test_a_server_splits_its_weights_and_the_own_engine_does_not(tmp_path):
    hardware = device(tmp_path, num=4, memory_gb=3)
    server = VllmConfig(dtype="bfloat16", slots=8, max_length=1000, python=Path("python"))
    estimate = Estimate(sampled=SAMPLED)
    assert "engine.tensor_parallel=2" in cost_on(hardware, "eval", estimate, server, MODEL).lines[-1]
    problem = cost_on(hardware, "eval", estimate, BFLOAT16, MODEL).problem
    assert "No layout fits; name larger devices, or a smaller model." in problem


def test_a_server_divides_its_heads_evenly(tmp_path):
    """As vLLM must: of Qwen2.5-7B's 28 heads eight devices could hold none but whole ones."""
    hardware = device(tmp_path, num=8, memory_gb=1.5)
    server = VllmConfig(dtype="bfloat16", slots=1, max_length=1000, python=Path("python"))
    found = {
        num: cost_on(hardware, "eval", Estimate(sampled=SAMPLED), server, replace(MODEL, num_heads=num)).lines[-1]
        for num in (24, 28)
    }
    assert "engine.tensor_parallel=8" in found[24]
    assert "tensor_parallel" not in found[28]


def test_more_devices_are_named_where_no_layout_fits(tmp_path):
    hardware = device(tmp_path, num=2, memory_gb=8)
    cost = cost_on(hardware, "rl", Estimate(sampled=SAMPLED, trained=trained()), BFLOAT16, MODEL)
    assert "No layout fits; name 8 x mine, or larger devices." in cost.problem
    text = "\n".join(cost.lines)  # of the layout over both that comes closest
    assert "trainer: 2 ranks" in text
    assert "KV for 1 conversation" in text
    assert "time:" not in text


def test_rollouts_whose_number_is_not_known_are_not_counted_as_none(tmp_path):
    lines = cost_on(device(tmp_path), "hard", Estimate(sampled=Sampled()), BFLOAT16, MODEL).lines
    assert [line.split(":")[0] for line in lines] == ["engines", "device", "time"]
    assert "disk" not in lines[1]
    assert lines[2].endswith(" of sampling for a billion tokens")


@pytest.mark.parametrize("text", ["8xH10", "H", "0xH100", "", "x", "8xnowhere.toml", "a" * 300])
def test_hardware_that_is_not_known_is_refused(text):
    with pytest.raises(ConfigError, match="no such device") as raised:
        Hardware.named(text)
    assert text in str(raised.value)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_fits_the_hardware_that_it_names_without_its_model(path):
    recipe = load_recipe(path)
    for stage in plan(recipe):
        text = "\n".join(stage.schedule)
        assert stage.problem == "", stage.name
        for role in re.findall(r"^(?:trainer|engines): .*", text, re.MULTILINE):
            assert float(re.findall(r"([\d.,]+) GiB", role)[0].replace(",", "")) > 1
        for role, what in (("trainer", "training"), ("engines", "sampling")):  # for a billion tokens where rows are not counted
            assert (f"{role}:" in text) == bool(re.search(rf"time: .*[1-9].* of {what}", text)), (stage.name, text)


def test_the_disk_of_rollouts_is_that_of_the_steps_that_are_kept_whole_and_of_eight_tasks_of_the_others():
    path = next(each for each in PRESETS if each.stem == "rstar2-paper")

    def gib(keep_rollouts):
        rl = next(each for each in plan(load_recipe(path, [f"stages.rl.keep_rollouts={keep_rollouts}"])) if each.name == "rl")
        return float(re.search(r"([\d.]+) GiB of rollouts", "\n".join(rl.schedule))[1])

    every, default = gib(100_000), gib(100)
    assert default == pytest.approx(every * (100 + 285 * 8 / 512) / 385, abs=0.1)
    assert gib(1) < default


@pytest.mark.parametrize("name", ["arpo-reasoning", "cs336-grpo", "rstar2-released"])
def test_twice_the_length_and_a_larger_model_take_more_memory_and_time(name, tmp_path):
    device(tmp_path)  # with room for every layout as it is written
    path = next(each for each in PRESETS if each.stem == name)

    def rl(*overrides):
        recipe = load_recipe(path, [f"hardware=8x{tmp_path / 'mine.toml'}", *overrides])
        return next(each for each in plan(recipe) if each.name == "rl")

    def needed(stage):
        return int(re.search(r"device: ([\d,]+) of", "\n".join(stage.schedule))[1].replace(",", ""))

    config = load_recipe(path).stages["rl"].config
    length = load_recipe(path).engine.max_length
    longer = [f"engine.max_length={2 * length}", f"stages.rl.sampling.max_tokens={2 * config.sampling.max_tokens}"]
    first, long, large = rl(), rl(*longer), rl("stages.base.size_of=Qwen/Qwen2.5-32B", "stages.base.path=models/none")
    assert min(long.time_s, large.time_s) > first.time_s
    assert min(needed(long), needed(large)) > needed(first)


SAID = {  # hours that the authors report, and the presets whose RL they are for
    "a week for rStar2-Agent (section 5.1)": (168, ["rstar2-paper", "rstar2-stage3"]),
    "27 hours for Dr. GRPO's 7B (section 3)": (27, ["drgrpo-7b"]),
}


@pytest.mark.parametrize("said", SAID)
def test_times_are_within_a_factor_of_three_of_those_reported(said):
    reported, names = SAID[said]
    stages = [stage for path in PRESETS if path.stem in names for stage in plan(load_recipe(path)) if stage.name == "rl"]
    assert reported / 3 < sum(stage.time_s for stage in stages) / 3600 < 3 * reported


CONFIGS = {  # as their config.json has them
    "Qwen/Qwen2.5-Math-1.5B": {
        "model_type": "qwen2", "hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "intermediate_size": 8960, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen/Qwen2.5-7B-Instruct": {
        "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-14B": {
        "model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "intermediate_size": 13824, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen/Qwen2.5-32B": {
        "model_type": "qwen2", "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40,
        "num_key_value_heads": 8, "intermediate_size": 27648, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-8B-Base": {
        "model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "Qwen/Qwen3-14B-Base": {
        "model_type": "qwen3", "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 17408, "vocab_size": 151936,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_those_of_the_published_configurations(name):
    keys = dict(CONFIGS[name])
    assert _count(transformers.AutoConfig.for_model(keys.pop("model_type"), **keys)) == SIZES[name]


def test_an_unknown_size_is_refused_with_those_that_are_known(tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('name = "x"\n[stages.base]\nkind = "model"\npath = "none"\nsize_of = "Qwen/Qwen9"\n')
    with pytest.raises(ConfigError, match=r"size_of is 'Qwen/Qwen9', but the sizes that strop knows are those of Qwen/Qwen2.5"):
        load_recipe(recipe)


def test_a_plan_for_hardware_says_what_it_is_for_and_ends_with_an_error_if_a_stage_does_not_fit():
    preset = str(next(each for each in PRESETS if each.stem == "rstar2-released"))
    fits = CliRunner().invoke(app, ["train", preset, "--dry-run", "--hardware", "16xH100"])
    assert fits.exit_code == 0
    assert "on 16 x H100, which is several machines: use them with --cluster." in " ".join(fits.output.split())
    small = CliRunner().invoke(app, ["train", preset, "--dry-run", "--hardware", "4xH100"])
    assert small.exit_code == 2
    assert (
        "does not fit: 4 of 4 devices, each with 104 of 75 GiB. No layout fits; name 16 x H100, or larger devices."
        in " ".join(small.output.split())
    )


def test_devices_of_other_hardware_need_not_be_here():
    recipe = ["stages.rl.trainer.device=cuda", "engine.device=cuda", "engine.devices=[7]"]
    tiny = Path(__file__).with_name("tiny.toml")
    with pytest.raises(UserError, match="torch sees no CUDA device"):
        plan(load_recipe(tiny, recipe))
    assert plan(load_recipe(tiny, [*recipe, "hardware=8xH100"]))


def test_an_evaluation_is_planned_for_a_model_that_is_not_here():
    recipe = str(PRESETS[0].parents[1] / "eval" / "math.toml")
    result = CliRunner().invoke(
        app,
        ["eval", recipe, "--model", "Qwen/Qwen3-8B-Base", "--dry-run", "--hardware", "8xH100", "--set", "stages.aime24.k=4"],
    )
    assert result.exit_code == 0, result.output
    assert "taken as 8.2 B parameters" in result.output
    assert "up to 120 rollouts" in result.output
    assert "GPU hours" in result.output


def test_an_evaluation_on_other_terms_than_its_training_is_pointed_out():
    tiny = Path(__file__).with_name("tiny.toml")
    stages = {each.name: each.schedule for each in plan(load_recipe(tiny, ["stages.after.sampling.max_tokens=16"]))}
    assert any("responses end at 16 tokens, but 'rl' trains on up to " in line for line in stages["after"])
    assert not any("responses end" in line for line in {each.name: each for each in plan(load_recipe(tiny))}["after"].schedule)


def test_the_cost_of_this_machine_counts_what_is_trained_and_sampled():
    estimate = Estimate(sampled=SAMPLED, trained=trained())
    cost = cost_here(estimate, BFLOAT16, MODEL, 1e12)
    parts = [16e9 + 2e9, 16_384 * 1000 * 340 * 2, 2e9, 8 * 1000 * 20_000]
    assert cost.memory_mib == pytest.approx(600 + sum(parts) / 2**20)
    assert cost.time_s == pytest.approx((8e18 / 0.35 + 2e9 * SAMPLED.tokens / 0.15) / 3 / 1e12)
