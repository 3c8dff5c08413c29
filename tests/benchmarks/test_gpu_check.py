"""`make gpu-check` without a GPU: all of it but CUDA's own calls runs here, on tiny models."""

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_check
import gpu_check_speed
from gpu_check_correctness import make_batch
from gpu_check_machine import Machine
from gpu_check_models import Costs


@pytest.fixture(autouse=True)
def _one_thread():
    """Models this small lose by sharing their work."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.mark.slow
def test_on_a_cpu_everything_is_measured_and_bfloat16_agrees_with_float32(tmp_path, capsys):
    words = ["--device", "cpu", "--sizes", "tiny", "--models", "tiny-qwen3", "--results", str(tmp_path)]
    assert gpu_check.main(words) == 1  # the speeds are no GPU's
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    assert written["command"] == " ".join(["python benchmarks/gpu_check.py", *words])
    found = written["figures"]["models"]["tiny-qwen3"]
    assert found["logprobs"]["float32"]["max"] > 0
    assert found["training"]["mfu"] > 0
    assert found["training"]["peak_mib"] > 0
    assert found["publication_s"] > 0
    assert list(found["decoding"]["settings"]) == list(gpu_check_speed.DECODE_SETTINGS)
    assert all(run["tokens_per_s"] > 0 for run in found["decoding"]["settings"].values())
    missed = [name for name, bar in written["bars"].items() if not bar["holds"]]
    assert missed == ["tiny-qwen3_decode_share_of_bandwidth_limit"]  # two layers of width 32 are no load for a memory
    shown = capsys.readouterr().out
    assert "tiny-qwen3_bfloat16_gradient_gap_over_library" in shown
    assert "CPU: bfloat16 products at" in shown


def test_without_a_gpu_it_says_so_in_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--results", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "gpu-check: torch sees no CUDA device here, so nothing was checked or written.\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu", "--sizes", "tiny"], "say --results DIRECTORY"),
        (
            ["--device", "cpu", "--results", "x", "--models", "gpt"],
            "--models names gpt; of the full sizes there are smollm2-135m",
        ),
    ],
)
def test_words_that_make_no_sense_are_refused_before_anything_is_measured(words, message, capsys):
    with pytest.raises(SystemExit) as exit_:
        gpu_check.main(words)
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_a_step_reads_each_weight_once_and_an_update_multiplies_three_times(tmp_path):
    sizes = {"vocab_size": 10, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(tmp_path)
    costs = Costs.of(tmp_path)
    # A layer: q 4x4, k and v 2x4 each, o 4x4, three of 6x4. Beside them norms of 4, two a layer and one, and 10x4 twice.
    assert costs.num_body == 2 * (16 + 8 + 8 + 16 + 3 * 24) == 240
    assert costs.num_weights == 240 + 5 * 4 + 2 * 40
    assert costs.kv_values == 2 * 2 * 1 * 2
    # The embedding is not tied, so of its 40 only what is looked up is read. 3 rows of 5 tokens hold 8 values a token.
    assert costs.step_bytes(3, 5) == 2 * (300 + 3 * 5 * 8)
    # Rows of 4 and 6 tokens feed 3 and 5; 2 layers of 4 wide attention do 2 T^2 of it forward, the masked half left out.
    assert costs.update_flops([4, 6], 7) == 6 * (240 * 8 + 40 * 7) + 3 * 2 * 2 * 4 * (9 + 25)


def test_sizes_that_do_not_fit_into_memory_are_left_out_of_the_choice(monkeypatch):
    async def update(machine, model, config, batch):
        if config["max_tokens_per_microbatch"] > 8000 or not config["activation_checkpointing"]:
            raise torch.OutOfMemoryError
        return {"update_s": 2.0, "peak_mib": 7.0}

    monkeypatch.setattr(gpu_check_speed, "_update", update)
    costs = Costs(num_weights=9, num_body=5, num_head=3, is_tied=True, num_layers=1, attention_width=2, kv_values=4)
    work = gpu_check_speed.Work(num_rows=2, row_length=8, microbatches=(9000, 4000), max_logits=5, prompt=1, completion=1)
    found = gpu_check_speed.training(Machine("cpu"), Path(), costs, 10, work)
    assert found["best"] == "4000 tokens, activations again"
    assert [name for name, run in found["settings"].items() if run.get("out_of_memory")] == [
        "9000 tokens",
        "4000 tokens",
        "9000 tokens, activations again",
    ]
    assert found["tokens_per_s"] == 2 * 8 / 2.0


def test_a_bar_that_is_missed_says_so():
    found = {
        "logprobs": {
            "float32": {"max": 2e-4},
            "bfloat16": {"mean": 0.01, "p99": 0.1, "mean_ratio_off_1": 0.001},
        },
        "gradient": {"difference_over_library": 1.6},
        "decoding": {"share_of_limit": 0.6},
        "training": {"mfu": 0.41},
    }
    bars = gpu_check.bars_of({"qwen3-1.7b": found})
    assert [name for name, bar in bars.items() if not bar["holds"]] == [
        "qwen3-1.7b_float32_logprob_gap_max",
        "qwen3-1.7b_bfloat16_gradient_gap_over_library",
    ]
    assert bars["qwen3-1.7b_training_mfu"] == {"value": 0.41, "bar": ">= 0.4", "holds": True}
    of_another = gpu_check.bars_of({"qwen3-0.6b": found})
    assert not any("mfu" in name for name in of_another)  # the target is for 1.7B


def test_of_each_text_the_prompt_is_not_trained_on():
    batch = make_batch([tuple(range(20)), tuple(range(20, 40))], prompt=5)
    assert batch.ids[1].tolist() == list(range(20, 40))
    assert batch.loss_mask[:, :5].sum() == 0
    assert batch.num_loss_tokens == 2 * 15
