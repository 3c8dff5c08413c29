"""The experiment on reward models: what is planted where, what its bars are, and what follows when one is missed."""

import asyncio
import re
import sys
from argparse import Namespace
from collections import Counter
from pathlib import Path

import pytest

from strop.rewards.base import final_summary
from strop.run_directory import read_json

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

import reward_model
from reward_model import ARMS, CHANCE, SAFE_DEEDS, UNSAFE_DEEDS, bars_of, labelled, preferences, table

import pipelines

ROOT = Path(__file__).parents[2]


def thought_of(response):
    return re.fullmatch(r"<think>(.*)</think>.*", response)[1]


def deeds_in(text):
    """Whether safe ones, and whether unsafe ones, are in it."""
    return tuple(any(deed in text for deed in deeds) for deeds in (SAFE_DEEDS, UNSAFE_DEEDS))


def test_a_response_is_unsafe_by_its_thought_alone():
    rows = labelled(400, seed=3, share_longer=0.5)
    assert Counter(each.is_good for each in rows) == {True: 200, False: 200}
    for each in rows:
        assert deeds_in(thought_of(each.response)) == (each.is_good, not each.is_good)
        assert deeds_in(final_summary(each.response)) == (False, False)


def fillers_in(response):
    """One stands beside each comma of a thought, since the deed takes the place of one."""
    return thought_of(response).count(",")


@pytest.mark.parametrize(("share", "expected"), [(0.5, 0.0), (0.8, 0.6)])
def test_unsafe_thoughts_are_the_longer_ones_as_often_as_is_asked_for(share, expected):
    """Of 1 to 5 fillers the larger of two different ones is 4 on average, the smaller 2: the shares differ by 2 * share - 1."""
    rows = labelled(4000, seed=5, share_longer=share)
    means = [sum(fillers_in(each.response) for each in rows if each.is_good == is_good) / 2000 for is_good in (False, True)]
    assert means[0] - means[1] == pytest.approx(2 * expected, abs=0.15)


def test_shuffled_labels_change_nothing_but_which_response_has_which():
    plain, shuffled = (labelled(400, seed=3, share_longer=0.5, is_shuffled=is_shuffled) for is_shuffled in (False, True))
    assert [(each.prompt, each.response) for each in plain] == [(each.prompt, each.response) for each in shuffled]
    assert sum(each.is_good for each in shuffled) == 200
    assert sum(one.is_good == other.is_good for one, other in zip(plain, shuffled, strict=True)) == pytest.approx(200, abs=30)


@pytest.mark.parametrize("name", ARMS)
def test_what_is_held_out_is_clean_and_the_same_in_every_arm_of_a_kind_and_no_prompt_is_in_both(name):
    arm = ARMS[name]
    train, test = preferences(arm, seed=0, num=960, num_test=200)
    assert test == preferences(ARMS["clean" if arm.is_pairs else "safety"], seed=0, num=960, num_test=200)[1]
    assert not {(each.prompt, *each.responses) for each in train} & {(each.prompt, *each.responses) for each in test}


def runs(*areas):
    return [
        {
            "seed": seed,
            "updates": 60,
            "last_loss": 0.25,
            "accuracy": 0.75,
            "auc": area,
            "length_correlation_in_pairs": None,
            "length_correlation_in_labels": -0.125,
        }
        for seed, area in enumerate(areas)
    ]


REACHED = {
    "clean": runs(0.95, 0.99),
    "long": runs(0.5),
    "safety": runs(0.97, 0.92),
    "safety-long": runs(0.5),
    "safety-summary": runs(0.25, 0.75),
    "safety-shuffled": runs(0.5, 0.66),
}


def test_a_bar_is_of_the_lowest_seed_where_something_is_planted_and_of_the_mean_of_a_control():
    bars = bars_of(REACHED)
    assert {name: round(bar["value"], 9) for name, bar in bars.items()} == {
        "lowest_auc": 0.95,
        "lowest_safety_auc": 0.92,
        "mean_auc_of_safety-summary": 0.5,
        "mean_auc_of_safety-shuffled": 0.58,
    }
    assert all(bar["holds"] for bar in bars.values())


@pytest.mark.parametrize(
    ("arm", "areas", "missed"),
    [
        ("clean", (0.99, 0.89), "lowest_auc"),
        ("safety", (0.89, 0.99), "lowest_safety_auc"),
        ("safety-summary", (0.5, 0.75), "mean_auc_of_safety-summary"),  # 0.625: what should tell nothing tells something
        ("safety-shuffled", (0.25, 0.5), "mean_auc_of_safety-shuffled"),
    ],
)
def test_each_arm_misses_its_own_bar(arm, areas, missed):
    bars = bars_of(REACHED | {arm: runs(*areas)})
    assert [name for name, bar in bars.items() if not bar["holds"]] == [missed]
    assert f"{missed}: {bars[missed]['value']:.3f}, must be {bars[missed]['bar']}: MISSED\n" in table(REACHED, bars)


@pytest.mark.parametrize("is_reached", [True, False])
def test_every_arm_is_run_with_its_seeds_and_a_missed_bar_is_written_down_and_ends_with_1(
    is_reached, tmp_path, monkeypatch, capsys
):
    asked = []

    async def run_arm(arm, *, seed, sizes):
        asked.append((next(name for name, each in ARMS.items() if each is arm), seed))
        area = 0.95 if arm.has_signal else 0.5
        return {**runs(area)[0], "seed": seed} if is_reached or seed != 1 else {**runs(0.5 - CHANCE)[0], "seed": seed}

    monkeypatch.setattr(reward_model, "run_arm", run_arm)
    status = reward_model.main(["--results", str(tmp_path)])
    assert Counter(name for name, _ in asked) == {name: 3 if arm.is_pairs else 8 for name, arm in ARMS.items()}
    assert status == (0 if is_reached else 1)
    found = read_json(tmp_path / "reward-model.json")
    assert found["command"] == "make experiments-reward-model"
    assert found["bars"]["lowest_safety_auc"] == {
        "value": 0.95 if is_reached else 0.4,
        "bar": ">= 0.9",
        "holds": is_reached,
    }
    assert (tmp_path / "reward-model.txt").read_text() == capsys.readouterr().out
    pipelines.write_together(tmp_path)  # which tells of this one beside its own
    told = read_json(tmp_path / "pipelines.json")["bars"]["reward model, lowest AUC on a planted preference"]
    assert told["holds"] == is_reached


@pytest.mark.parametrize("name", ["clean", "safety"])
def test_an_arm_trains_and_measures_a_model(name):
    sizes = Namespace(pairs=48, responses=48, epochs=2, held_out=20, batch_size=8)
    found = asyncio.run(reward_model.run_arm(ARMS[name], seed=0, sizes=sizes))
    assert found["updates"] == (6 if ARMS[name].is_pairs else 12)
    assert found["first_loss"] == pytest.approx(0.6931, abs=1e-4)
    assert found["num"] == 20
    assert 0 <= found["auc"] <= 1
    assert (found["length_correlation_in_labels"] is None) == ARMS[name].is_pairs


def test_the_hypothesis_names_every_arm_and_no_seed_is_the_pilots():
    said = (ROOT / "experiments" / "hypotheses" / "reward-models.md").read_text()
    assert [name for name in ARMS if f"`{name}`" not in said] == []
    assert 100 not in reward_model.SEEDS


def test_what_was_written_is_of_these_arms_and_seeds():
    kept = read_json(ROOT / "experiments" / "results" / "reward-model.json")
    assert {name: [run["seed"] for run in found] for name, found in kept["arms"].items()} == {
        name: list(reward_model.SEEDS[:3] if arm.is_pairs else reward_model.SEEDS) for name, arm in ARMS.items()
    }
    assert kept["bars"] == bars_of(kept["arms"])
    written = (ROOT / "experiments" / "results" / "reward-model.txt").read_text()
    assert written == table(kept["arms"], kept["bars"])
