"""Measures the embedded engine's tokens per second, against transformers' generate() and vLLM's CPU build.

SmolLM2-135M in bfloat16; 64 conversations of 3 turns in 8 groups of one prompt each, tools of 50 to 500 ms between the turns.
Each engine lives in a process of its own, at the best of the settings that were swept; then they take turns. vLLM has an
environment of its own. Prints tables and writes results/engine.{json,txt}. `make bench-engine`, on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from engine_workload import (
    COMPLETION_TOKENS,
    GROUP_SIZE,
    MAX_LENGTH,
    NUM_COMPLETION_TOKENS,
    NUM_CONVERSATIONS,
    NUM_PROMPTS,
    NUM_TURNS,
    OBSERVATION_TOKENS,
    PROMPT_TOKENS,
    TOOL_S,
)
from result_file import foreign_environment, write_result
from rich.console import Console
from rich.table import Table

from strop.engine.config import EngineConfig
from strop.engine.protocol import CompletionRequest
from strop.engine.torch.batch import DraftTimes
from strop.engine.torch.decoder import Decoder
from strop.engine.torch.engine import TorchEngine
from strop.engine.torch.kv_cache import Row, StepShape
from strop.engine.torch.sampling import draw
from strop.engine.torch.weights import PublishedWeights
from strop.run_directory import write_text

HERE = Path(__file__).parent
RESULTS = HERE / "results"
COMMAND = "make bench-engine"
ROUNDS = 5
OURS = {"64 slots": [], "64 slots, not deterministic": ["--deterministic", "0"]}
GENERATE = {f"batches of {batch}": ["--batch", str(batch)] for batch in (32, 64)}
VLLM = {
    "64 rows, no seeds": ["--no-seeds"],
    "64 rows, no seeds, no log-probs": ["--no-seeds", "--no-logprobs"],
}
GENERATE_BAR, VLLM_BAR, MEMORY_BAR, CEILING_AIM = 2.5, 2.0, 1.1, 0.5
ROWS = 64
TAIL_QUESTION = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
    " How many clips did Natalia sell altogether in April and May?"
)
TAIL_TOKENS, TAIL_ROUNDS = 96, 5


class Player:
    """An engine in a process of its own, which plays the workload when told."""

    def __init__(self, setting: str, command: list[str], environment: dict[str, str]) -> None:
        self.setting = setting
        self.seconds: list[float] = []
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=HERE,
            env=environment,
        )
        self.facts = self._read()
        self._read()

    def play(self) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write("play\n")
        self._process.stdin.flush()
        played = self._read()
        self.seconds.append(played["seconds"])
        return played

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _read(self) -> dict[str, Any]:
        """The next JSON line; engines print other things, too."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        self._log.seek(0)
        raise SystemExit(f"{self.setting}: it ended:\n{self._log.read().decode(errors='replace')[-3000:]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What is compared, and how it is started."""

    name: str
    python: Path
    script: str
    settings: dict[str, list[str]]
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, setting: str, model: Path) -> Player:
        command = [str(self.python), str(HERE / self.script), "--model", str(model), *self.settings[setting]]
        own = dict(os.environ) if self.name == "strop" else foreign_environment()
        return Player(f"{self.name}, {setting}", command, own | self.environment)

    def best(self, model: Path, console: Console) -> tuple[str, dict[str, float]]:
        """The fastest setting, and what each took in its first playing."""
        swept = {}
        for setting in self.settings:
            player = self.start(setting, model)
            swept[setting] = player.play()["seconds"]
            player.close()
            console.print(f"{self.name}, {setting}: {NUM_COMPLETION_TOKENS / swept[setting]:.0f} tokens/s")
        return min(swept, key=swept.__getitem__), swept


def rate(seconds: list[float]) -> float:
    return NUM_COMPLETION_TOKENS / statistics.median(seconds)


def measure_step(model: Path) -> dict[str, float]:
    """Milliseconds of one decode step of 64 rows over 256 columns and of its parts; the least of several."""
    config = transformers.AutoConfig.from_pretrained(model)
    decoder = Decoder(config, dtype=torch.bfloat16, device=torch.device("cpu"), num_slots=ROWS, max_length=MAX_LENGTH)
    PublishedWeights(decoder.weights).read(model, 0)
    weights, shape = decoder.weights, decoder.architecture
    hidden = torch.randn(ROWS, shape.hidden_size).bfloat16()
    heads = torch.randn(ROWS, shape.num_heads * shape.head_dim).bfloat16()
    inner = torch.randn(ROWS, shape.intermediate_size).bfloat16()
    rows = [Row(slot=slot, id=50, position=250) for slot in range(ROWS)]
    sizes = StepShape(num_tokens=ROWS, num_rows=ROWS, num_slots=ROWS, num_columns=256)
    logits = torch.randn(ROWS, shape.vocab_size).bfloat16()
    ones, uniform = torch.ones(ROWS), torch.rand(ROWS, dtype=torch.float64)

    def products() -> None:
        for layer in weights.layers:
            layer.qkv.product(hidden)
            layer.output.product(heads)
            layer.gate.product(hidden)
            layer.up.product(hidden)
            layer.down.product(inner)
        weights.head.product(hidden)

    def least_ms(function: Any) -> float:
        taken = []
        with torch.inference_mode():
            for _ in range(12):
                started = time.perf_counter()
                function()
                taken.append(time.perf_counter() - started)
        return 1e3 * min(taken)

    return {
        "products_ms": least_ms(products),
        "step_ms": least_ms(lambda: decoder.step(rows, (), sizes)),
        "sampling_ms": least_ms(lambda: draw(logits, ones, uniform, None)),
    }


def measure_tail(model: Path, dtype: str = "bfloat16", threads: int | None = None) -> dict[str, float]:
    """Of the last 4 of 16 attempts at a problem, when the others have ended: seconds with drafts and without, and tokens.

    Also the seconds of all threads, which say more on a busy machine.
    """
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    question = [{"role": "user", "content": TAIL_QUESTION}]
    ids = tuple(tokenizer.apply_chat_template(question, add_generation_prompt=True, tokenize=True, return_dict=False))
    config = EngineConfig(slots=ROWS, max_length=MAX_LENGTH, dtype=dtype, device="cpu", threads=threads)
    choose = DraftTimes.choose

    async def play(number: int) -> tuple[float, float, list[Any]]:
        async def complete(attempts: range) -> list[Any]:
            requests = [
                CompletionRequest(
                    id=f"{number}/{each}",
                    ids=ids,
                    max_tokens=TAIL_TOKENS,
                    stop_ids=frozenset({tokenizer.eos_token_id}),
                    temperature=1.0,
                    seed=16 * number + each,
                )
                for each in attempts
            ]
            completions = await asyncio.gather(*map(engine.complete, requests))
            for request in requests:
                await engine.release(request.id)
            return completions

        await complete(range(12))
        started, busy = time.perf_counter(), time.process_time()
        late = await complete(range(12, 16))
        return time.perf_counter() - started, time.process_time() - busy, late

    engine = TorchEngine.from_directory(model, config)
    names = ("with", "without")
    seconds, busy_s, drafted, num = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0), 0, 0
    with asyncio.Runner() as runner:
        for number in range(TAIL_ROUNDS):
            bits = []
            for name in names[:: 1 if number % 2 else -1]:
                DraftTimes.choose = choose if name == "with" else lambda *_: 0  # type: ignore[method-assign]
                taken, busy, late = runner.run(play(number))
                bits.append([(each.ids, each.logprobs) for each in late])
                if number:  # the first round measures the lengths
                    seconds[name] += taken
                    busy_s[name] += busy
                    drafted += sum(each.drafted_tokens for each in late)
                    num += len([token for each in late for token in each.ids])
            assert bits[0] == bits[1]
        runner.run(engine.close())
    DraftTimes.choose = choose  # type: ignore[method-assign]
    shares = {f"{name}_s": seconds[name] for name in names} | {f"{name}_cpu_s": busy_s[name] for name in names}
    return {**shares, "tokens": num / 2, "drafted_tokens": drafted, "speedup": seconds["without"] / seconds["with"]}


def measure(model: Path, vllm_python: Path, console: Console) -> dict[str, Any]:
    here = Path(sys.executable)
    engines = [
        Engine(name="strop", python=here, script="engine_strop.py", settings=OURS),
        Engine(name="generate", python=here, script="engine_generate.py", settings=GENERATE),
        Engine(
            name="vllm",
            python=vllm_python,
            script="engine_vllm.py",
            settings=VLLM,
            environment={"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "WARNING"},
        ),
    ]
    step, tail = measure_step(model), measure_tail(model)
    chosen, sweep = {}, {}
    for engine in engines:
        chosen[engine.name], sweep[engine.name] = engine.best(model, console)
    players = {engine.name: engine.start(chosen[engine.name], model) for engine in engines}
    memory: dict[str, Any] = {}
    for player in players.values():
        player.play()  # warms it up
        player.seconds.clear()
    for number in range(ROUNDS):
        for name, player in players.items():
            played = player.play()
            if name == "strop":
                memory = {**player.facts, **played}
            console.print(f"round {number + 1}, {name}: {NUM_COMPLETION_TOKENS / played['seconds']:.0f} tokens/s")
    for player in players.values():
        player.close()
    return {
        "chosen": chosen,
        "sweep_tokens_per_s": {
            name: {setting: NUM_COMPLETION_TOKENS / taken for setting, taken in of.items()} for name, of in sweep.items()
        },
        "tokens_per_s": {name: rate(player.seconds) for name, player in players.items()},
        "rounds_s": {name: player.seconds for name, player in players.items()},
        "step": step,
        "tail": tail,
        "memory": memory_of(model, memory),
    }


def memory_of(model: Path, memory: dict[str, Any]) -> dict[str, float]:
    """MiB: the peak of anonymous memory above the idle process with everything imported; weights and KV budget."""
    config = transformers.AutoConfig.from_pretrained(model)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim
    weights = sum(path.stat().st_size for path in model.glob("*.safetensors"))
    is_float32 = json.loads((model / "config.json").read_text()).get("dtype") == "float32"
    return {
        "peak_above_idle": (memory["peak_kib"] - memory["idle_kib"]) / 1024,
        "weights": weights / (2 if is_float32 else 1) / 2**20,
        "kv_budget": memory["kv_tokens"] * kv_token / 2**20,
    }


def bars_of(figures: dict[str, Any]) -> dict[str, dict[str, Any]]:
    speeds, memory = figures["tokens_per_s"], figures["memory"]
    ceiling = ROWS / figures["step"]["products_ms"] * 1e3
    values = {
        "tokens/s over generate()": (speeds["strop"] / speeds["generate"], GENERATE_BAR, 1),
        "tokens/s over vLLM": (speeds["strop"] / speeds["vllm"], VLLM_BAR, 1),
        "peak memory over weights + KV budget": (
            memory["peak_above_idle"] / (memory["weights"] + memory["kv_budget"]),
            MEMORY_BAR,
            -1,
        ),
        "share of the ceiling of its matrix products": (speeds["strop"] / ceiling, CEILING_AIM, 1),
    }
    return {
        name: {"value": value, "bar": bar, "holds": (value - bar) * sign >= 0} for name, (value, bar, sign) in values.items()
    }


def show(figures: dict[str, Any], bars: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table("engine", "setting", "tokens/s", "rounds, s", title=figures["workload"])
    for name, speed in figures["tokens_per_s"].items():
        taken = " ".join(f"{seconds:.1f}" for seconds in figures["rounds_s"][name])
        table.add_row(name, figures["chosen"][name], f"{speed:.0f}", taken)
    console.print(table)
    step = figures["step"]
    console.print(
        f"A step of {ROWS} rows over 256 columns takes {step['step_ms']:.1f} ms, {step['products_ms']:.1f} ms of them matrix"
        f" products ({ROWS / step['products_ms'] * 1e3:.0f} tokens/s, the ceiling), and sampling {step['sampling_ms']:.1f} ms."
    )
    tail = figures["tail"]
    console.print(
        f"The last 4 of 16 attempts at a problem: {tail['without_s']:.1f} s without drafts, {tail['with_s']:.1f} s with"
        f" them, which had {tail['drafted_tokens']:.0f} of {tail['tokens']:.0f} tokens right."
    )
    memory = figures["memory"]
    console.print(
        f"Peak memory above idle: {memory['peak_above_idle']:.0f} MiB; weights {memory['weights']:.0f} MiB,"
        f" KV budget {memory['kv_budget']:.0f} MiB."
    )
    verdicts = Table("bar", "value", "bar", "holds")
    for name, bar in bars.items():
        verdicts.add_row(name, f"{bar['value']:.2f}", f"{bar['bar']:.2f}", "yes" if bar["holds"] else "NO")
    console.print(verdicts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"))
    parser.add_argument("--vllm-python", type=Path, default=Path(".venv-vllm/bin/python"))
    arguments = parser.parse_args()
    console = Console(record=True, width=128)
    figures = measure(arguments.model.resolve(), arguments.vllm_python.absolute(), console)
    figures["workload"] = (
        f"{NUM_CONVERSATIONS} conversations of {NUM_TURNS} turns, {NUM_PROMPTS} prompts of"
        f" {PROMPT_TOKENS[0]}-{PROMPT_TOKENS[1]} tokens x {GROUP_SIZE}, {COMPLETION_TOKENS} tokens a turn,"
        f" observations of {OBSERVATION_TOKENS}, tools {1000 * TOOL_S[0]:.0f}-{1000 * TOOL_S[1]:.0f} ms"
    )
    bars = bars_of(figures)
    show(figures, bars, console)
    write_text(RESULTS / "engine.txt", console.export_text())
    return write_result("engine", command=COMMAND, bars=bars, **figures)


if __name__ == "__main__":
    sys.exit(main())
