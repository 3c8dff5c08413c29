"""Pairs out of judgements, with a judge that a test scripts: it is asked through the client's protocol, not over HTTP."""

import asyncio

import pytest

from strop.chat_client import ChatServiceConfig, Reply
from strop.rewards.judge import JudgeConfig, ModelJudge
from strop.training.pair_making import Candidates, PairMaking, balanced
from strop.training.preferences import Pair

CONFIG = JudgeConfig(service=ChatServiceConfig(url="http://nobody", model="m"), tries=1)


class Scripted:
    """Replies by what is asked, and keeps it."""

    def __init__(self, answer):
        self.answer, self.asked = answer, []

    async def reply(self, messages, *, draw=0):
        self.asked.append(messages[0]["content"])
        return Reply(text=self.answer(self.asked[-1], draw), finish_reason="stop")

    async def close(self):
        pass


def made(answer, candidates, **keys):
    client = Scripted(answer)
    return asyncio.run(PairMaking(**keys).make(ModelJudge(CONFIG, client), candidates)), client


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


THOUGHTS = Candidates(prompt="q", first="<think>POOR at first</think>GOOD", second="<think>GOOD luck</think>POOR")


def test_the_judge_sees_summaries_and_the_pair_has_the_whole_responses():
    found, client = made(better(">>"), [THOUGHTS])
    assert found.pairs == (Pair(prompt="q", chosen=THOUGHTS.first, rejected=THOUGHTS.second),)
    assert not any("think" in asked or "luck" in asked for asked in client.asked)


def test_the_judge_sees_whole_responses_where_these_are_judged():
    _, client = made(better(">>"), [THOUGHTS], judged_on="response")
    assert all(THOUGHTS.first in asked and THOUGHTS.second in asked for asked in client.asked)


@pytest.mark.parametrize(
    ("second", "keys", "num_left_out"),
    [
        ("<think>POOR, and", {}, 1),  # a thought that does not end
        ("POOR, and", {"is_prefilled": True}, 1),
        ("POOR, and", {}, 0),
        ("<think>POOR</think>  ", {}, 1),
        ("<reason>POOR, and", {"think_tag": "reason"}, 1),
        ("<think>POOR, and", {"judged_on": "response"}, 0),
    ],
)
def test_a_candidate_without_a_summary_is_left_out_counted_and_not_asked_for(second, keys, num_left_out):
    tag = keys.get("think_tag", "think")
    candidates = [Candidates(prompt="q", first=f"so</{tag}>GOOD", second=second)]
    found, client = made(better(">>"), candidates, **keys)
    assert found.num_without_summary == num_left_out
    assert len(client.asked) == 4 * (1 - num_left_out)


@pytest.mark.parametrize(("judged_on", "num_kept"), [("summary", 2), ("response", 0)])
def test_the_lengths_that_are_balanced_are_those_of_what_is_judged(judged_on, num_kept):
    # The whole of what is chosen is the longer one both times; its summary is once, and once the other's.
    def answer(summary):
        return f"<think>{'hm ' * 100}</think>{summary}"

    candidates = [
        Candidates(prompt="q", first=answer("GOOD" * 10), second="POOR" * 5),
        Candidates(prompt="r", first=answer("GOOD" * 5), second="POOR" * 10),
    ]
    found, _ = made(better(">>"), candidates, judged_on=judged_on)
    assert (len(found.pairs), found.num_unbalanced) == (num_kept, 2 - num_kept)


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


class Slow(Scripted):
    """Keeps how many wait for its answer at most."""

    num_waiting = most_waiting = 0

    async def reply(self, messages, *, draw=0):
        self.num_waiting += 1
        self.most_waiting = max(self.most_waiting, self.num_waiting)
        await asyncio.sleep(0.01)
        self.num_waiting -= 1
        return await super().reply(messages, draw=draw)


def test_of_many_candidates_a_part_waits_for_the_judge_at_a_time_and_the_pairs_are_the_same(monkeypatch):
    many = [Candidates(prompt=f"q{n}", first="GOOD", second="POOR") for n in range(11)]
    at_once, _ = made(better(">>"), many)
    monkeypatch.setattr("strop.training.pair_making._AT_ONCE", 3)
    client = Slow(better(">>"))
    assert asyncio.run(PairMaking().make(ModelJudge(CONFIG, client), many)) == at_once
    assert len(at_once.pairs) == 11
    assert client.most_waiting == 3 * 4
