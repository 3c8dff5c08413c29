"""Does a tiny reward model learn a planted preference, and not the length of a response?

    make experiments-reward-model    (about a minute on 2 cores)

Planted: of two responses to a question, the polite one is better; politeness is one of six phrases somewhere in it. In arm
`clean` chosen and rejected are equally long on average; in arm `long` the chosen one is the longer one in 4 of 5 pairs of
training, while held-out pairs are clean, so what length taught is seen. Each arm trains new models (random weights), one a
seed.

Written before the first run: the held-out AUC of `clean` is at least 0.9 (the bar), and its correlation of score and length
within pairs is within 0.2 of 0; `long` has a larger one. Writes experiments/results/reward-model.{json,txt}; ends with exit
code 1 below the bar.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strop.evaluation.preferences import pair_quality
from strop.pipelines.tiny_model import make_tokenizer
from strop.runs import write_json, write_text
from strop.training.config import OptimizerConfig, Schedule, TrainerConfig
from strop.training.preferences import Pair, PreferenceRows, as_rows
from strop.training.reward_model import RewardTrainer

RESULTS = Path(__file__).resolve().parent.parent / "experiments" / "results"
COMMAND = "make experiments-reward-model"
BAR = 0.9
NOUNS = ["lamp", "train", "river", "stove", "letter", "violin", "garden", "window", "ticket", "bridge"]
POLITE = ["thank you", "of course", "with pleasure", "you are welcome", "kindly", "glad to help"]
RUDE = ["whatever", "not my job", "find out", "who cares", "stop asking", "be quick"]
FILLERS = [
    "it is by the door",
    "look again",
    "the last one is blue",
    "this was so before",
    "it takes a day",
    "two of them are new",
]


def response(draw: random.Random, phrases: list[str], num_fillers: int) -> str:
    parts = draw.choices(FILLERS, k=num_fillers)
    parts.insert(draw.randrange(num_fillers + 1), draw.choice(phrases))
    return ", ".join(parts)


def pairs(num: int, *, seed: int, share_longer: float) -> list[Pair]:
    """In `share_longer` of them the chosen response is the longer one."""
    draw = random.Random(seed)
    made = []
    for number in range(num):
        few, many = sorted(draw.sample(range(1, 6), 2))
        chosen_length, rejected_length = (many, few) if draw.random() < share_longer else (few, many)
        made.append(
            Pair(
                prompt=f"what of the {draw.choice(NOUNS)} {number}",
                chosen=response(draw, POLITE, chosen_length),
                rejected=response(draw, RUDE, rejected_length),
            )
        )
    return made


def make_model(directory: Path, texts: list[str], *, seed: int) -> None:
    tokenizer = make_tokenizer(texts, vocab_size=448)
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    sizes = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        initializer_range=0.08,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(sizes).save_pretrained(directory)


async def arm(share_longer: float, *, seed: int, num: int, batch_size: int) -> dict[str, Any]:
    train = pairs(num, seed=seed, share_longer=share_longer)
    test = pairs(200, seed=seed + 1000, share_longer=0.5)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), [text for pair in train for text in (pair.prompt, *pair.responses)], seed=seed)
        steps = -(-num // batch_size)
        optimizer = OptimizerConfig(lr=2e-3, warmup_updates=5, schedule=Schedule.COSINE)
        trainer = RewardTrainer(Path(place), TrainerConfig(optimizer=optimizer), total_updates=steps)
        try:
            ids = as_rows(train, trainer.exchanges, judged_on="summary", think_tag="think", max_length=512)
            known = [rows for rows in ids if rows is not None]
            losses = [(await trainer.update(known[at : at + batch_size])).loss for at in range(0, len(known), batch_size)]
            held_out = as_rows(test, trainer.exchanges, judged_on="summary", think_tag="think", max_length=512)
            return {"seed": seed, "first_loss": losses[0], "last_loss": losses[-1], "updates": len(losses)} | await measured(
                trainer, [rows for rows in held_out if rows is not None], started
            )
        finally:
            await trainer.close()


async def measured(trainer: RewardTrainer, held_out: list[PreferenceRows], started: float) -> dict[str, Any]:
    rows = [row for each in held_out for row in each.rows]
    scores, lengths = await trainer.score(rows), [len(row) for row in rows]
    quality = pair_quality(scores[::2], scores[1::2], lengths[::2], lengths[1::2])
    return {**quality.as_json(), "time_s": time.perf_counter() - started}


def table(results: dict[str, list[dict[str, Any]]]) -> str:
    lines = [f"{'arm':<8}{'seed':>5}{'updates':>9}{'last loss':>11}{'accuracy':>10}{'AUC':>8}{'length in pairs':>17}"]
    for name, runs in results.items():
        lines += [
            f"{name:<8}{run['seed']:>5}{run['updates']:>9}{run['last_loss']:>11.3f}{run['accuracy']:>10.3f}{run['auc']:>8.3f}"
            f"{run['length_correlation_in_pairs']:>17.3f}"
            for run in runs
        ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=960)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)  # so small a model gains nothing from two, and loses where others compute
    shares = {"clean": 0.5, "long": 0.8}
    results = {
        name: [
            asyncio.run(arm(share, seed=seed, num=options.pairs, batch_size=options.batch_size))
            for seed in range(options.seeds)
        ]
        for name, share in shares.items()
    }
    lowest = min(run["auc"] for run in results["clean"])
    verdict = f"lowest AUC of clean: {lowest:.3f}, bar {BAR}: {'reached' if lowest >= BAR else 'MISSED'}\n"
    bars = {"lowest_auc": {"value": lowest, "bar": f">= {BAR}", "holds": lowest >= BAR}}
    write_json(options.results / "reward-model.json", {"command": COMMAND, "bars": bars, "arms": results})
    write_text(options.results / "reward-model.txt", table(results) + verdict)
    print(table(results) + verdict, end="")
    return 0 if lowest >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
