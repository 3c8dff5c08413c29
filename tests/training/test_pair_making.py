"""Pairs out of judgements, with a judge that a test scripts: it is asked through the client's protocol, not over HTTP."""

import asyncio

import pytest

from strop.rewards.scorers import ChatServiceConfig, JudgeConfig, ModelJudge, Reply
from strop.training.pair_making import Candidates, balanced, make_pairs
from strop.training.preferences import Pair

CONFIG = JudgeConfig(service=ChatServiceConfig(url="http://nobody", model="m"), tries=1)


class Scripted:
    """Replies by what is asked, and keeps it."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def reply(self, messages, *, draw=0):
        self.asked.append(messages[0]["content"])
        return Reply(text=self.answer(self.asked[-1], draw), finish_reason="stop", num_prompt_tokens=0, num_completion_tokens=0)

    async def close(self):
        pass


def made(answer, candidates, **keys):
    client = Scripted(answer)
    return asyncio.run(make_pairs(ModelJudge(CONFIG, client), candidates, **keys)), client


def better(strength):
    """Prefers GOOD wherever it stands."""
    return lambda asked, _: f"[[A{strength}B]]" if asked.index("GOOD") < asked.index("POOR") else f"[[B{strength}A]]"


BOTH = [Candidates(prompt="q", first="GOOD", second="POOR"), Candidates(prompt="r", first="POOR", second="GOOD")]


def test_a_clear_difference_in_four_judgements_makes_a_pair():
    found, client = made(better(">>"), BOTH)
    assert found.pairs == (Pair(prompt="q", chosen="GOOD", rejected="POOR"), Pair(prompt="r", chosen="GOOD", rejected="POOR"))
    assert len(client.asked) == 8
    assert {asked.index("GOOD") < asked.index("POOR") for asked in client.asked} == {True, False}  # in both orders


def test_a_mean_difference_of_1_is_not_clear():
    found, _ = made(better(">"), BOTH)
    assert (found.pairs, found.num_unclear) == ((), 2)


def test_a_judge_that_goes_by_place_makes_no_pairs():
    found, _ = made(lambda *_: "[[A>>B]]", [Candidates(prompt=f"q{n}", first="GOOD", second="POOR") for n in range(40)])
    # All four in one order by chance is 2 of 16, and so are their pairs; all others cancel out to at most 1.
    assert len(found.pairs) <= 12
    assert found.num_unclear >= 28


def test_a_judgement_without_a_verdict_leaves_the_pair_out():
    found, _ = made(lambda asked, draw: "what?" if draw == 3 else better(">>")(asked, draw), BOTH)
    assert (found.pairs, found.num_unjudged) == ((), 2)


def lengths(*pairs):
    return [Pair(prompt=str(n), chosen="c" * chosen, rejected="r" * rejected) for n, (chosen, rejected) in enumerate(pairs)]


def test_chosen_and_rejected_are_the_longer_one_equally_often():
    pairs = lengths((20, 10), (21, 10), (22, 10), (10, 20), (9, 9))
    kept = balanced(pairs, seed=0)
    assert pairs[3] in kept
    assert pairs[4] in kept
    assert sum(len(each.chosen) > len(each.rejected) for each in kept) == 1


def test_a_large_difference_is_not_set_off_by_a_small_one():
    assert balanced(lengths((100, 10), (10, 11)), seed=0) == []


@pytest.mark.parametrize("seed", [0, 1])
def test_which_are_left_out_follows_from_the_seed(seed):
    pairs = lengths(*[(20, 10)] * 6, *[(10, 20)] * 3)
    assert balanced(pairs, seed=seed) == balanced(pairs, seed=seed)
    assert len(balanced(pairs, seed=seed)) == 6
