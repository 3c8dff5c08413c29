"""Checks strop on a CUDA device: bfloat16 against float32, and the speed of training and decoding against the device's limits.

SmolLM2-135M where its directory is there, and the shapes of Qwen3-0.6B and 1.7B with random weights. Prints tables and writes
results/gpu-check.json, anew after each model. What does not fit into the device's memory is left out, and its bars do not hold.
`make gpu-check`. Without a CUDA device it says so and writes nothing; `--device cpu --sizes tiny
--results DIRECTORY` runs the same code on tiny models, whose speeds mean nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from gpu_check_correctness import MAX_LENGTH, gradient_gap, logprob_gaps
from gpu_check_machine import Machine, or_out_of_memory
from gpu_check_models import Costs, write_random
from gpu_check_speed import FULL, TINY, Work, decoding, publication, training
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from transformers.utils import logging as transformers_logging

from strop.run_directory import write_json

RESULTS = Path(__file__).parent / "results"
COMMAND = "make gpu-check"
SMOLLM2 = "smollm2-135m"
MODELS = {"full": (SMOLLM2, "qwen3-0.6b", "qwen3-1.7b"), "tiny": ("tiny-llama", "tiny-qwen3")}
TRAINED_AT = "qwen3-1.7b"  # whose MFU has a bar
EXACT_BAR, MEAN_BAR, P99_BAR, RATIO_BAR, GRADIENT_BAR = 1e-4, 0.02, 0.15, 0.01, 1.5
MFU_BAR, DECODE_BAR = 0.4, 0.5
FIGURE_OF = {  # of each part of a model's check one that it has if it fits into memory
    "logprobs": ("float32", "max"),
    "gradient": ("difference_over_library",),
    "training": ("tflops",),
    "publication_s": (),
    "decoding": ("tokens_per_s",),
}


def check(machine: Machine, model: Path, work: Work, *, peak_flops: float, bandwidth: float) -> dict[str, Any]:
    """All figures of one model; `out_of_memory` names the parts that lack theirs."""
    costs = Costs.of(model)
    vocabulary: int = AutoConfig.from_pretrained(model).vocab_size
    gradient_length = min(MAX_LENGTH, work.row_length)
    parts: dict[str, Callable[[], Any]] = {
        "logprobs": lambda: logprob_gaps(machine, model, {"decode": "static"}),
        "gradient": lambda: gradient_gap(machine, model, num_rows=4, length=gradient_length),
        "training": lambda: training(machine, model, costs, vocabulary, work),
        "publication_s": lambda: asyncio.run(publication(machine, model)),
        "decoding": lambda: decoding(machine, model, costs, vocabulary, work, bandwidth=bandwidth),
    }
    measured = {name: or_out_of_memory(machine, measure) for name, measure in parts.items()}
    found = {"weights": costs.num_weights} | {name: part for name, part in measured.items() if part is not None}
    if (tflops := figure(found, "training", "tflops")) is not None:
        found["training"]["mfu"] = tflops * 1e12 / peak_flops
    return found | {"out_of_memory": [name for name, keys in FIGURE_OF.items() if figure(found, name, *keys) is None]}


def figure(found: Any, *keys: str) -> float | None:
    """What lies there; None where the check ran out of memory before it."""
    for key in keys:
        if key not in found:
            return None
        found = found[key]
    value: float = found
    return value


def bars_of(models: dict[str, dict[str, Any]], *, num_to_come: int = 0) -> dict[str, dict[str, Any]]:
    """What a model lacks for want of memory, or because the check ended before it, holds no bar."""
    bars: dict[str, dict[str, Any]] = {}

    def at_most(name: str, value: float | None, bar: float) -> None:
        bars[name] = {"value": value, "bar": f"<= {bar}", "holds": value is not None and value <= bar}

    def at_least(name: str, value: float | None, bar: float) -> None:
        bars[name] = {"value": value, "bar": f">= {bar}", "holds": value is not None and value >= bar}

    for name, found in models.items():
        at_most(f"{name}_parts_out_of_memory", len(found["out_of_memory"]), 0)
        at_most(f"{name}_float32_logprob_gap_max", figure(found, "logprobs", "float32", "max"), EXACT_BAR)
        at_most(f"{name}_bfloat16_logprob_gap_mean", figure(found, "logprobs", "bfloat16", "mean"), MEAN_BAR)
        at_most(f"{name}_bfloat16_logprob_gap_p99", figure(found, "logprobs", "bfloat16", "p99"), P99_BAR)
        at_most(f"{name}_bfloat16_mean_ratio_off_1", figure(found, "logprobs", "bfloat16", "mean_ratio_off_1"), RATIO_BAR)
        difference = figure(found, "gradient", "difference_over_library")
        at_most(f"{name}_bfloat16_gradient_gap_over_library", difference, GRADIENT_BAR)
        at_least(f"{name}_decode_share_of_bandwidth_limit", figure(found, "decoding", "share_of_limit"), DECODE_BAR)
    if TRAINED_AT in models:
        at_least(f"{TRAINED_AT}_training_mfu", figure(models[TRAINED_AT], "training", "mfu"), MFU_BAR)
    at_most("models_not_reached", num_to_come, 0)
    return bars


def show(figures: dict[str, Any], bars: dict[str, dict[str, Any]], console: Console) -> None:
    console.print(
        f"{figures['device']}: bfloat16 products at {figures['matmul_tflops']:.1f} TFLOP/s measured,"
        f" {figures['peak_tflops']:.1f} taken as its peak ({figures['peak_is']}); a copy reads and writes"
        f" {figures['bandwidth_gb_per_s']:.0f} GB/s."
    )
    columns = ("model", "update", "MFU", "tokens/s", "peak MiB", "publication s", "decode tokens/s", "of the limit", "peak MiB")
    table = Table(*columns, title="Speed")
    for name, found in figures["models"].items():
        trained = found.get("training", {})
        table.add_row(
            name,
            trained.get("best", "out of memory"),
            _shown(figure(found, "training", "mfu"), ".2f"),
            _shown(figure(found, "training", "tokens_per_s"), ".0f"),
            _shown(figure(found, "training", "peak_mib"), ".0f"),
            _shown(figure(found, "publication_s"), ".2f"),
            _shown(figure(found, "decoding", "tokens_per_s"), ".0f"),
            _shown(figure(found, "decoding", "share_of_limit"), ".2f"),
            _shown(figure(found, "decoding", "peak_mib"), ".0f"),
        )
    console.print(table)
    for name, found in figures["models"].items():
        if found["out_of_memory"]:
            console.print(f"{name}: out of memory in {', '.join(found['out_of_memory'])}.")
    verdicts = Table("bar", "value", "bar", "holds")
    for name, bar in bars.items():
        verdicts.add_row(name, _shown(bar["value"], ".3g"), bar["bar"], "yes" if bar["holds"] else "NO")
    console.print(verdicts)


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else f"{value:{form}}"


def main(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--sizes", choices=tuple(MODELS), default="full")
    parser.add_argument("--models", help="some of them, separated by commas; default: all of the sizes")
    parser.add_argument(
        "--smollm2", type=Path, default=Path("models/smollm2-135m"), help="its directory; left out if not there"
    )
    parser.add_argument(
        "--peak-tflops", type=float, help="of bfloat16 products, for MFU; default: the vendor's, or the measured"
    )
    parser.add_argument("--results", type=Path, help=f"where the figures go; default on CUDA: {RESULTS}")
    chosen = parser.parse_args(given)
    if chosen.device == "cuda" and not torch.cuda.is_available():
        print("gpu-check: torch sees no CUDA device here, so nothing was checked or written.")
        return 0
    if chosen.device == "cpu" and chosen.results is None:
        parser.error("figures of a CPU are not written among those of GPUs: say --results DIRECTORY")
    transformers_logging.disable_progress_bar()
    names = tuple(chosen.models.split(",")) if chosen.models else MODELS[chosen.sizes]
    if unknown := [name for name in names if name not in MODELS[chosen.sizes]]:
        parser.error(
            f"--models names {', '.join(unknown)}; of the {chosen.sizes} sizes there are {', '.join(MODELS[chosen.sizes])}"
        )
    machine, console = Machine(chosen.device), Console(width=128)
    path = (chosen.results or RESULTS) / "gpu-check.json"
    command = " ".join(["python benchmarks/gpu_check.py", *given]) if given else COMMAND
    for figures, num_to_come in measure(machine, names, chosen, console):
        bars = bars_of(figures["models"], num_to_come=num_to_come)
        write_json(path, _writable({"command": command, "bars": bars, "figures": figures}))
    show(figures, bars, console)
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


def _writable(value: Any) -> Any:
    """JSON has no number that is not finite, so such a figure is written as a word."""
    if isinstance(value, dict):
        return {key: _writable(each) for key, each in value.items()}
    return repr(value) if isinstance(value, float) and not math.isfinite(value) else value


def measure(
    machine: Machine, names: Sequence[str], chosen: argparse.Namespace, console: Console
) -> Iterator[tuple[dict[str, Any], int]]:
    """All figures so far, before the first model and after each, with how many models are still to come."""
    is_full = chosen.sizes == "full"
    matmul, bandwidth = machine.matmul_flops(8192 if is_full else 256), machine.bandwidth(2**31 if is_full else 2**22)
    machine.clear()
    peak_tflops: float | None = chosen.peak_tflops
    peak_flops = 1e12 * peak_tflops if peak_tflops else machine.published_flops or matmul
    figures: dict[str, Any] = {
        "device": machine.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "matmul_tflops": matmul / 1e12,
        "peak_tflops": peak_flops / 1e12,
        "peak_is": "--peak-tflops" if peak_tflops else "the vendor's" if machine.published_flops else "the measured one",
        "bandwidth_gb_per_s": bandwidth / 1e9,
        "models": {},
    }
    yield figures, len(names)
    for num_done, name in enumerate(names, start=1):
        if name == SMOLLM2 and not (chosen.smollm2 / "config.json").exists():
            console.print(f"{name}: no model in {chosen.smollm2}, left out.")
        else:
            console.print(f"{name} ...")
            with tempfile.TemporaryDirectory(prefix="strop-gpu-check-") as made:
                directory = chosen.smollm2 if name == SMOLLM2 else Path(made)
                if name != SMOLLM2:
                    write_random(name, directory, machine.device)
                work = FULL if is_full else TINY
                figures["models"][name] = check(machine, directory, work, peak_flops=peak_flops, bandwidth=bandwidth)
        yield figures, len(names) - num_done


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
