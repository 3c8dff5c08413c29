"""Truncated sampling and entropies of the likeliest tokens, on distributions that can be worked out by hand."""

import math

import pytest
import torch

from strop.engine.protocol import Entropies, Truncation
from strop.engine.servers.server import entropy_of, num_logprobs
from strop.engine.torch.sampling import DrawLimits, cut_off, entropy_of_likeliest, limited

PROBABILITIES = (0.4, 0.3, 0.2, 0.1)
SCALED = torch.tensor(PROBABILITIES).log()


@pytest.mark.parametrize(
    ("limits", "kept"),
    [
        ({"top_k": 2}, (0, 1)),
        ({"top_k": 9}, (0, 1, 2, 3)),
        ({"top_p": 0.69}, (0, 1)),
        ({"top_p": 0.71}, (0, 1, 2)),
        ({"top_p": 1e-9}, (0,)),
        ({"min_p": 0.6}, (0, 1)),  # 0.2 < 0.6 * 0.4
        ({"min_p": 1.0}, (0,)),
        ({"top_k": 3, "top_p": 0.75}, (0, 1)),  # of the three that are left, 4/9 + 3/9 = 0.78 reach it
        ({"min_p": 0.3, "top_p": 0.9}, (0, 1, 2)),  # 0.1 < 0.3 * 0.4
    ],
)
def test_the_tokens_that_are_kept_follow_from_their_probabilities(limits, kept):
    assert tuple((~cut_off(SCALED, Truncation(**limits))).nonzero().flatten().tolist()) == kept


def _limited(logits, *, temperature=1.0, seen=(), entropies=Entropies.ANY, **limits):
    truncation = Truncation(**limits) if limits else None
    row = DrawLimits(truncation=truncation, entropies=entropies, seen=seen)
    return limited(torch.tensor([logits]), None, [row], [temperature])


def test_a_repeated_token_loses_by_the_penalty_whatever_its_sign():
    logits, banned, _ = _limited([2.0, -1.0, 3.0], seen=[0, 1, 1], repetition_penalty=2.0)
    assert logits.tolist() == [[1.0, -2.0, 3.0]]
    assert not banned.any()


def test_the_temperature_comes_before_the_cut():
    # At temperature 0.5 the probabilities are as their squares: 16, 9, 4 and 1 of 30; two of them reach 0.8.
    _, banned, _ = _limited(SCALED.tolist(), temperature=0.5, top_p=0.8)
    assert banned.tolist() == [[False, False, True, True]]


def test_a_banned_token_stays_banned_and_counts_for_nothing():
    row = DrawLimits(truncation=Truncation(top_k=2), entropies=Entropies.TOP10, seen=())
    banned = torch.tensor([[True, False, False, False]])
    _, banned, entropies = limited(SCALED[None], banned, [row], [1.0])
    assert banned.tolist() == [[True, False, False, True]]
    of_rest = [each / 0.6 for each in (0.3, 0.2, 0.1)]
    assert entropies == {0: pytest.approx(-sum(p * math.log(p) for p in of_rest), abs=1e-6)}


def test_the_entropy_of_the_ten_likeliest_leaves_the_rest_out():
    # Ten tokens of 0.09 and ten of 0.01.
    scaled = torch.tensor([0.09] * 10 + [0.01] * 10).log()
    assert entropy_of_likeliest(scaled) == pytest.approx(-10 * 0.09 * math.log(0.09), abs=1e-6)
    assert entropy_of_likeliest(SCALED) == pytest.approx(-sum(p * math.log(p) for p in PROBABILITIES), abs=1e-6)


def test_a_server_is_asked_for_one_more_than_is_used_and_what_is_left_is_spread_evenly():
    assert (num_logprobs(Entropies.ANY), num_logprobs(Entropies.TOP10), num_logprobs(Entropies.FULL)) == (0, 11, 21)
    # 20 tokens of 0.04 in the answer and 0.2 over 100 others, each 0.002; the sampled one is the last of 21.
    logprobs = [math.log(0.002), *[math.log(0.04)] * 20]
    exact = -20 * 0.04 * math.log(0.04) - 100 * 0.002 * math.log(0.002)
    assert entropy_of(logprobs, Entropies.FULL, vocab_size=120) == pytest.approx(exact, abs=1e-9)
    assert entropy_of(logprobs, Entropies.TOP10, vocab_size=120) == pytest.approx(-10 * 0.04 * math.log(0.04), abs=1e-9)


def test_the_estimate_is_never_below_the_entropy_and_not_far_above_it():
    generator = torch.Generator().manual_seed(0)
    for scale, most in ((1.0, 0.35), (4.0, 0.25)):
        logits = torch.randn(200, 1000, generator=generator, dtype=torch.float64) * scale
        exact = torch.distributions.Categorical(logits=logits).entropy()
        likeliest = logits.log_softmax(1).topk(21).values
        estimates = torch.tensor([entropy_of(row, Entropies.FULL, vocab_size=1000) for row in likeliest.tolist()])
        gaps = estimates - exact
        assert (gaps > -1e-9).all()
        assert gaps.mean() < most


def test_a_distribution_without_a_rest_has_its_own_entropy():
    logprobs = [math.log(each) for each in PROBABILITIES]
    assert entropy_of(logprobs, Entropies.FULL, vocab_size=4) == pytest.approx(-sum(p * math.log(p) for p in PROBABILITIES))
    assert entropy_of([0.0, -math.inf], Entropies.FULL, vocab_size=2) == 0.0
