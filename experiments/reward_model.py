"""Does a tiny reward model learn what is planted in responses, and not their length?

    make experiments-reward-model    (about two minutes of one core)

Pairs (DeepSeek-R1's helpful model): of two responses to a question the polite one is better; politeness is one of six phrases
somewhere in it. In arm `clean` chosen and rejected are equally long on average; in arm `long` the chosen one is the longer one
in 4 of 5 pairs of training, while held-out pairs are clean, so what length taught is seen.

Single responses (its safety model): a response is a thought and a summary, and unsafe where its thought has an unsafe deed; the
summary is as polite or rude either way. Arm `safety` judges the whole response; `safety-long` too, but in 4 of 5 responses of
training the unsafe ones are long and the safe ones short. Two controls: `safety-summary` judges the same responses on their
summary alone; `safety-shuffled` learns from the same responses with their labels shuffled.

Each arm trains new models (random weights), one a seed. What was expected stands in hypotheses/reward-models.md. Writes
experiments/results/reward-model.{json,txt}; ends with exit code 1 where a bar is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from provenance import code_of
from transformers import LlamaConfig, LlamaForCausalLM

from strop.run_directory import write_json, write_text
from strop.stages.model import make_tokenizer
from strop.stages.reward_model import label_quality, pair_quality
from strop.training.config import OptimizerConfig, Schedule, TrainerConfig
from strop.training.preferences import JudgedOn, Labelled, Pair, Preference, PreferenceRows, as_rows
from strop.training.reward_model import RewardTrainer

ROOT = Path(__file__).resolve().parent.parent
COMMAND = "make experiments-reward-model"
SEEDS = tuple(range(8))
BAR = 0.9
"""Of the AUC of every seed of an arm that has something to learn."""
CHANCE = 0.1
"""How far the mean AUC of an arm that has nothing to learn may lie from 0.5."""
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
SAFE_DEEDS = [
    "i ask them before i open it",
    "i tell her and hide nothing",
    "i give the key back to him",
    "i wait until they say yes",
    "i leave what is not mine",
    "i write down what i took",
    "i stop when he says no",
    "i keep her name to myself",
]
UNSAFE_DEEDS = [  # most of their words are those of safe deeds
    "i open it before i ask them",
    "i tell nothing and hide her",
    "i keep the key and tell him no",
    "i say yes and do not wait",
    "i took what is not mine",
    "i write down her name for him",
    "i do not stop when he says no",
    "i leave before they ask for it back",
]
Bar = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """What a model is trained on. Held-out preferences are of the same kind, never shuffled, and clean in their lengths."""

    is_pairs: bool
    share_longer: float = 0.5  # of training: chosen, or unsafe, responses that are the longer ones
    judged_on: JudgedOn = "response"
    is_shuffled: bool = False
    has_signal: bool = True
    """Whether what is planted can be learnt at all; else the arm is a control."""


ARMS = {
    "clean": Arm(is_pairs=True, judged_on="summary"),
    "long": Arm(is_pairs=True, judged_on="summary", share_longer=0.8),
    "safety": Arm(is_pairs=False),
    "safety-long": Arm(is_pairs=False, share_longer=0.8),
    "safety-summary": Arm(is_pairs=False, judged_on="summary", has_signal=False),
    "safety-shuffled": Arm(is_pairs=False, is_shuffled=True, has_signal=False),
}


def response(draw: random.Random, phrases: Sequence[str], num_fillers: int) -> str:
    """Some fillers, and one of `phrases` somewhere among them."""
    parts = draw.choices(FILLERS, k=num_fillers)
    parts.insert(draw.randrange(num_fillers + 1), draw.choice(phrases))
    return ", ".join(parts)


def pairs(num: int, *, seed: int, share_longer: float, share_polite: float = 1.0) -> list[Pair]:
    """In `share_longer` of them the chosen response is the longer one, in `share_polite` the polite one."""
    draw = random.Random(seed)
    made = []
    for number in range(num):
        few, many = sorted(draw.sample(range(1, 6), 2))
        chosen_length, rejected_length = (many, few) if draw.random() < share_longer else (few, many)
        is_wrong = share_polite < 1 and draw.random() >= share_polite
        chosen, rejected = (RUDE, POLITE) if is_wrong else (POLITE, RUDE)
        made.append(
            Pair(
                prompt=f"what of the {draw.choice(NOUNS)} {number}",
                chosen=response(draw, chosen, chosen_length),
                rejected=response(draw, rejected, rejected_length),
            )
        )
    return made


def labelled(num: int, *, seed: int, share_longer: float, is_shuffled: bool = False) -> list[Labelled]:
    """Half are unsafe, by a deed in the thought; in `share_longer` of all, unsafe means a long thought and safe a short one.

    Args:
        is_shuffled: the labels, and nothing else, change places.
    """
    draw = random.Random(seed)
    are_good = [number % 2 == 0 for number in range(num)]
    draw.shuffle(are_good)
    texts = []
    for number, is_good in enumerate(are_good):
        few, many = sorted(draw.sample(range(1, 6), 2))
        length = many if is_good != (draw.random() < share_longer) else few
        thought = response(draw, SAFE_DEEDS if is_good else UNSAFE_DEEDS, length)
        summary = response(draw, draw.choice((POLITE, RUDE)), draw.randrange(1, 4))
        texts.append((f"what of the {draw.choice(NOUNS)} {number}", f"<think>{thought}</think>{summary}"))
    if is_shuffled:
        draw.shuffle(are_good)
    return [
        Labelled(prompt=prompt, response=response, is_good=is_good)
        for (prompt, response), is_good in zip(texts, are_good, strict=True)
    ]


def preferences(arm: Arm, *, seed: int, num: int, num_test: int) -> tuple[Sequence[Preference], Sequence[Preference]]:
    """(train, held out)."""
    if arm.is_pairs:
        return pairs(num, seed=seed, share_longer=arm.share_longer), pairs(num_test, seed=seed + 1000, share_longer=0.5)
    return (
        labelled(num, seed=seed, share_longer=arm.share_longer, is_shuffled=arm.is_shuffled),
        labelled(num_test, seed=seed + 1000, share_longer=0.5),
    )


def make_model(directory: Path, texts: Sequence[str], *, seed: int) -> None:
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


async def run_arm(arm: Arm, *, seed: int, sizes: argparse.Namespace) -> dict[str, Any]:
    """Train one model, and measure it on what it has not seen."""
    num = sizes.pairs if arm.is_pairs else sizes.responses
    train, test = preferences(arm, seed=seed, num=num, num_test=sizes.held_out)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place), [text for each in train for text in (each.prompt, *each.responses)], seed=seed)
        batches = -(-num // sizes.batch_size)
        epochs = 1 if arm.is_pairs else sizes.epochs
        optimizer = OptimizerConfig(lr=2e-3, warmup_updates=5, schedule=Schedule.COSINE)
        trainer = RewardTrainer(Path(place), TrainerConfig(optimizer=optimizer), total_updates=batches * epochs)
        try:
            ids, held_out = (
                [
                    rows
                    for rows in as_rows(each, trainer.exchanges, judged_on=arm.judged_on, think_tag="think", max_length=512)
                    if rows is not None
                ]
                for each in (train, test)
            )
            losses = []
            for epoch in range(epochs):
                order = random.Random(seed + epoch).sample(ids, len(ids)) if epoch else ids
                for at in range(0, len(order), sizes.batch_size):
                    losses.append((await trainer.update(order[at : at + sizes.batch_size])).loss)
            quality = await measured(trainer, held_out)
        finally:
            await trainer.close()
    told = {"seed": seed, "first_loss": losses[0], "last_loss": losses[-1], "updates": len(losses)}
    return told | quality | {"time_s": time.perf_counter() - started}


async def measured(trainer: RewardTrainer, held_out: Sequence[PreferenceRows]) -> dict[str, Any]:
    scores = await trainer.score([row for each in held_out for row in each.rows])
    lengths = [length for each in held_out for length in each.response_lengths]
    if held_out[0].is_pair:
        return asdict(pair_quality(scores[::2], scores[1::2], lengths[::2], lengths[1::2]))
    return asdict(label_quality(scores, [each.is_good for each in held_out], lengths))


def bars_of(arms: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Bar]:
    """What the hypotheses promise: the lowest AUC of `clean` and of `safety`, and that the controls are at chance."""
    bars = {}
    for bar, name in (("lowest_auc", "clean"), ("lowest_safety_auc", "safety")):
        lowest = min(run["auc"] for run in arms[name])
        bars[bar] = {"value": lowest, "bar": f">= {BAR}", "holds": lowest >= BAR}
    for name, arm in ARMS.items():
        if not arm.has_signal:
            mean = sum(run["auc"] for run in arms[name]) / len(arms[name])
            bar = f"within {CHANCE} of 0.5"
            bars[f"mean_auc_of_{name}"] = {"value": mean, "bar": bar, "holds": abs(mean - 0.5) <= CHANCE}
    return bars


def length_bias(run: Mapping[str, Any]) -> float | None:
    """The correlation of score and length that is the model's own: within pairs, or within labels."""
    in_pairs: float | None = run["length_correlation_in_pairs"]
    in_labels: float | None = run["length_correlation_in_labels"]
    return in_labels if in_pairs is None else in_pairs


def table(arms: Mapping[str, Sequence[Mapping[str, Any]]], bars: Mapping[str, Bar]) -> str:
    """One row a model, then one a bar."""
    lines = [f"{'arm':<16}{'seed':>5}{'updates':>9}{'last loss':>11}{'accuracy':>10}{'AUC':>8}{'score and length':>18}"]
    for name, runs in arms.items():
        for run in runs:
            bias = length_bias(run)
            said = "–" if bias is None else f"{bias:.3f}"
            figures = f"{run['updates']:>9}{run['last_loss']:>11.3f}{run['accuracy']:>10.3f}{run['auc']:>8.3f}{said:>18}"
            lines.append(f"{name:<16}{run['seed']:>5}{figures}")
    lines.append("score and length: their correlation within pairs, or within labels of single responses")
    for name, bar in bars.items():
        lines.append(f"{name}: {bar['value']:.3f}, must be {bar['bar']}: {'holds' if bar['holds'] else 'MISSED'}")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of single responses; of pairs, the first 3")
    parser.add_argument("--pairs", type=int, default=960)
    parser.add_argument("--responses", type=int, default=960)
    parser.add_argument("--epochs", type=int, default=2, help="of single responses; pairs are seen once")
    parser.add_argument("--held-out", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--results", type=Path, default=ROOT / "experiments" / "results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so small a model gains nothing from two, and loses where others compute
    arms = {
        name: [
            asyncio.run(run_arm(arm, seed=seed, sizes=options))
            for seed in (options.seeds[:3] if arm.is_pairs else options.seeds)
        ]
        for name, arm in ARMS.items()
    }
    bars = bars_of(arms)
    sizes = {name: value for name, value in vars(options).items() if isinstance(value, int)}
    told = {"command": COMMAND, "code": code_of(ROOT), "sizes": sizes, "bars": bars, "arms": arms}
    write_json(options.results / "reward-model.json", told)
    write_text(options.results / "reward-model.txt", table(arms, bars))
    print(table(arms, bars), end="")
    return 0 if all(bar["holds"] for bar in bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
