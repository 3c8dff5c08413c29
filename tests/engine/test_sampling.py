"""The draw itself, on distributions that can be worked out by hand."""

import math

import pytest
import torch

from strop.engine.torch import sampling
from strop.engine.torch.cpu.kernels import draw_kernels
from strop.engine.torch.sampling import banned_mask, draw, uniforms

LOGITS = torch.tensor([0.5, 0.25, 0.25]).log()


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def drawn_by(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(sampling, "draw_kernels", lambda logits: None)
    elif draw_kernels(LOGITS) is None:
        pytest.skip("needs a C compiler and a processor with AVX2")


def _scene(num_rows, num_ids, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(num_rows, num_ids, generator=generator)).to(dtype)
    temperatures = torch.rand(num_rows, generator=generator) + 0.25
    return logits, temperatures, torch.rand(num_rows, generator=generator, dtype=torch.float64)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("num_ids", [1, 3, 16, 255, 256, 257, 5000])
def test_ids_logprobs_and_entropies_are_those_of_the_distribution(num_ids, dtype):
    logits, temperatures, uniform = _scene(50, num_ids, dtype)
    temperatures[7] = temperatures[8] = 0.0
    banned = [(row, row % num_ids) for row in range(0, 50, 3) if num_ids > 1]
    ids, logprobs, entropies = draw(logits, temperatures, uniform, banned_mask(logits, banned))
    exact = logits.double()
    for row, id in banned:
        exact[row, id] = -torch.inf
    exact = (exact / temperatures.masked_fill(temperatures == 0, 1.0).unsqueeze(1)).log_softmax(1)
    ids = ids.long()
    upper = exact.exp().cumsum(1)
    for row in range(50):
        if row in (7, 8):
            assert exact[row, ids[row]] == exact[row].max()
            continue
        below = upper[row, ids[row] - 1] if ids[row] else 0.0
        assert below - 1e-6 <= uniform[row] <= upper[row, ids[row]] + 1e-6
        assert exact[row, ids[row]] > -87
    assert torch.allclose(logprobs, exact.gather(1, ids.unsqueeze(1)).squeeze(1), rtol=1e-5, atol=1e-5)
    assert torch.allclose(entropies, -(exact.exp() * exact).nan_to_num().sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_a_row_is_drawn_alike_wherever_it_is(dtype):
    logits, temperatures, uniform = _scene(70, 3000, dtype)
    whole = draw(logits, temperatures, uniform, None)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(1))
    assert torch.equal(draw(logits[order], temperatures[order], uniform[order], None), whole[:, order])
    for row in (0, 33, 69):
        one = slice(row, row + 1)
        assert torch.equal(draw(logits[one], temperatures[one], uniform[one], None), whole[:, one])


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_stay_visible(broken):
    logits, temperatures, uniform = _scene(4, 600, torch.float32)
    logits[2, 300] = broken
    _, logprobs, _ = draw(logits, temperatures, uniform, None)
    assert logprobs.isnan().tolist() == [False, False, True, False]


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
