"""`make gpu-check` without a GPU: all of it but CUDA's own calls runs here, on tiny models."""

import asyncio
import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.engine.torch.batch import Batch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu_check
import gpu_check_correctness
import gpu_check_speed
from gpu_check_correctness import make_batch
from gpu_check_machine import Machine
from gpu_check_models import Costs


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
    found["out_of_memory"] = []
    bars = gpu_check.bars_of({"qwen3-1.7b": found})
    assert [name for name, bar in bars.items() if not bar["holds"]] == [
        "qwen3-1.7b_float32_logprob_gap_max",
        "qwen3-1.7b_bfloat16_gradient_gap_over_library",
    ]
    assert bars["qwen3-1.7b_training_mfu"] == {"value": 0.41, "bar": ">= 0.4", "holds": True}
    of_another = gpu_check.bars_of({"qwen3-0.6b": found})
    assert not any("mfu" in name for name in of_another)  # the target is for 1.7B


WORDS = ("--device", "cpu", "--sizes", "tiny")


def test_where_an_engine_runs_out_of_memory_the_other_parts_are_told(tmp_path, monkeypatch, capsys):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("of the test")

    training = {"settings": {}, "best": "96 tokens", "mfu": 0.1, "tflops": 1.0, "tokens_per_s": 5.0, "peak_mib": 7.0}
    monkeypatch.setattr(gpu_check, "training", lambda *_: training)
    monkeypatch.setattr(Batch, "step", out_of_memory)  # in the engine's own thread, so its requests tell that it is lost
    assert gpu_check.main([*WORDS, "--models", "tiny-qwen3", "--results", str(tmp_path)]) == 1
    written = json.loads((tmp_path / "gpu-check.json").read_text())
    found = written["figures"]["models"]["tiny-qwen3"]
    assert found["out_of_memory"] == ["logprobs", "gradient", "decoding"]
    assert found["training"]["mfu"] > 0
    assert found["publication_s"] > 0
    assert found["decoding"]["settings"]["eager"] == {"out_of_memory": True}
    assert written["bars"]["tiny-qwen3_parts_out_of_memory"] == {"value": 3, "bar": "<= 0", "holds": False}
    assert written["bars"]["tiny-qwen3_bfloat16_gradient_gap_over_library"]["value"] is None
    assert [name for name, bar in written["bars"].items() if bar["holds"]] == ["models_not_reached"]
    assert "tiny-qwen3: out of memory in logprobs, gradient, decoding." in capsys.readouterr().out


PARTS = {
    "logprob_gaps": {
        "float32": {"max": 1e-5},
        "bfloat16": {"max": 0.1, "mean": 0.01, "p99": 0.1, "mean_ratio_off_1": 0.001},
    },
    "gradient_gap": {"difference_over_library": 1.0},
    "training": {"settings": {}, "best": "96 tokens", "tflops": 1.0, "tokens_per_s": 5.0, "peak_mib": 7.0},
    "publication": 0.5,
    "decoding": {"settings": {}, "tokens_per_s": 9.0, "share_of_limit": 0.6, "peak_mib": 8.0},
}


def stub_parts(monkeypatch, **others):
    """Parts that find at once what meets every bar, or do what `others` say."""

    async def publication(*_):
        return PARTS["publication"]

    for name, figures in PARTS.items():
        stub = publication if name == "publication" else lambda *_, figures=figures, **__: json.loads(json.dumps(figures))
        monkeypatch.setattr(gpu_check, name, others.get(name, stub))


@pytest.mark.parametrize(
    ("part", "missed"),
    [
        (
            "logprob_gaps",
            [
                "float32_logprob_gap_max",
                "bfloat16_logprob_gap_mean",
                "bfloat16_logprob_gap_p99",
                "bfloat16_mean_ratio_off_1",
            ],
        ),
        ("training", []),  # its bar is of a larger model
        ("decoding", ["decode_share_of_bandwidth_limit"]),
    ],
)
def test_a_part_that_does_not_fit_into_memory_is_a_bar_that_does_not_hold(tmp_path, monkeypatch, part, missed):
    def out_of_memory(*_, **__):
        raise torch.OutOfMemoryError

    stub_parts(monkeypatch, **{part: out_of_memory})
    assert gpu_check.main([*WORDS, "--models", "tiny-qwen3", "--results", str(tmp_path)]) == 1
    bars = json.loads((tmp_path / "gpu-check.json").read_text())["bars"]
    assert [name for name, bar in bars.items() if not bar["holds"]] == [
        f"tiny-qwen3_{name}" for name in ["parts_out_of_memory", *missed]
    ]
    assert all(bars[f"tiny-qwen3_{name}"]["value"] is None for name in missed)


def test_figures_of_a_model_are_on_disk_before_the_next_one_is_begun(tmp_path, monkeypatch):
    def fails_on_the_second(machine, model, settings):
        if (tmp_path / "gpu-check.json").exists() and written()["figures"]["models"]:
            raise RuntimeError("the driver is lost")
        return PARTS["logprob_gaps"] | {"float32": {"max": float("nan")}}  # JSON knows none

    def written():
        return json.loads((tmp_path / "gpu-check.json").read_text())

    stub_parts(monkeypatch, logprob_gaps=fails_on_the_second)
    with pytest.raises(RuntimeError, match="the driver is lost"):
        gpu_check.main([*WORDS, "--results", str(tmp_path)])
    assert list(written()["figures"]["models"]) == ["tiny-llama"]
    assert written()["bars"]["tiny-llama_float32_logprob_gap_max"] == {"value": "nan", "bar": "<= 0.0001", "holds": False}
    assert written()["bars"]["models_not_reached"] == {"value": 1, "bar": "<= 0", "holds": False}


def test_a_gradient_that_does_not_fit_gives_its_trainer_back(tmp_path, monkeypatch):
    closed = []

    class Full:
        @classmethod
        def from_directory(cls, *_):
            return cls()

        async def update(self, *_):
            raise torch.OutOfMemoryError

        async def close(self):
            closed.append(self)

    monkeypatch.setattr(gpu_check_correctness, "Trainer", Full)
    with pytest.raises(torch.OutOfMemoryError):
        asyncio.run(gpu_check_correctness._gradient(Machine("cpu"), tmp_path, "float32", None))
    assert len(closed) == 1


def test_of_each_text_the_prompt_is_not_trained_on():
    batch = make_batch([tuple(range(20)), tuple(range(20, 40))], prompt=5)
    assert batch.ids[1].tolist() == list(range(20, 40))
    assert batch.loss_mask[:, :5].sum() == 0
    assert batch.num_loss_tokens == 2 * 15
