"""The draw itself, on distributions that can be worked out by hand."""

import math

import pytest
import torch

from strop.engine.torch.sampling import draw, uniforms

LOGITS = torch.tensor([0.5, 0.25, 0.25]).log()


def _draw(uniform, *, temperature=1.0, banned=None, logits=LOGITS):
    banned = None if banned is None else torch.tensor([banned])
    drawn = draw(logits[None], torch.tensor([temperature]), torch.tensor([uniform], dtype=torch.float64), banned)
    return tuple(drawn[:, 0].tolist())


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 0), (0.49, 0), (0.51, 1), (0.74, 1), (0.76, 2), (1 - 2**-52, 2)])
def test_a_token_is_drawn_where_the_cumulative_probability_passes_the_uniform(uniform, token):
    drawn, logprob, entropy = _draw(uniform)
    assert drawn == token
    assert logprob == pytest.approx(LOGITS[token].item())
    assert entropy == pytest.approx(1.5 * math.log(2))


def test_temperature_sharpens_before_logprob_and_entropy():
    # p^2 normalised: 4/6, 1/6, 1/6
    _, logprob, entropy = _draw(0.0, temperature=0.5)
    assert logprob == pytest.approx(math.log(4 / 6))
    assert entropy == pytest.approx(-(4 / 6) * math.log(4 / 6) - (2 / 6) * math.log(1 / 6))


def test_a_banned_token_is_never_drawn_and_the_rest_is_renormalised():
    banned = [True, False, True]
    for uniform in (0.0, 0.5, 1 - 2**-52):
        assert _draw(uniform, banned=banned) == (1, pytest.approx(0.0), pytest.approx(0.0))
    for temperature in (0.0, 0.01):
        assert _draw(0.3, banned=[True, False, False], temperature=temperature)[0] in (1, 2)


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.tensor([-1e4, 0.0, -1e4])
    assert {_draw(uniform, logits=logits)[0] for uniform in (0.0, 0.5, 1 - 2**-52)} == {1}


def test_uniforms_belong_to_seed_and_position():
    assert uniforms(7, 5) == uniforms(7, 100)[:5]
    assert uniforms(7, 5) != uniforms(8, 5)
    assert uniforms(-1, 3) == uniforms(2**64 - 1, 3)
    drawn = torch.tensor([uniforms(seed, 50) for seed in range(400)], dtype=torch.float64)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.01)
    assert drawn.var().item() == pytest.approx(1 / 12, abs=0.003)
    # Neither positions of a seed nor neighbouring seeds at a position are correlated: 1 / sqrt(20000) is 0.007.
    for left, right in [(drawn[:, :-1], drawn[:, 1:]), (drawn[:-1], drawn[1:]), (drawn[:-1, 1:], drawn[1:, :-1])]:
        correlation = torch.corrcoef(torch.stack((left.flatten(), right.flatten())))[0, 1]
        assert abs(correlation) < 0.03
