"""The loss of an update against one written in loops over rows and tokens, from the papers' formulas, for every setting."""

import math
from itertools import product

import pytest
import torch

from strop.algorithms.grpo import GRPO
from strop.algorithms.losses import Aggregation, KLEstimator, Mismatch, RatioLevel, token_weights
from strop.algorithms.method import Column, LossInputs
from strop.algorithms.policy_loss import Loss

VOCABULARY = 5
MASK = torch.tensor(
    [
        [0, 1, 1, 0, 1, 1],
        [0, 0, 1, 0, 0, 0],
        [0, 1, 1, 1, 1, 0],
        [0, 0, 0, 0, 0, 0],
        [0, 1, 0, 1, 0, 0],
    ],
    dtype=torch.bool,
)
GROUPS = [0, 0, 1, 1, 1]
CLIP_LOW, CLIP_HIGH, CAP, KL_COEFFICIENT, ENTROPY_COEFFICIENT, CONSTANT = 0.2, 0.28, 1.5, 0.3, 0.05, 7

generator = torch.Generator().manual_seed(192)
LOGITS = torch.randn(*MASK.shape, VOCABULARY, generator=generator)
IDS = torch.randint(0, VOCABULARY, MASK.shape, generator=generator)
ADVANTAGES = torch.randn(len(MASK), 1, generator=generator).expand(MASK.shape)
CURRENT = LOGITS.log_softmax(-1).gather(-1, IDS[..., None]).squeeze(-1)
OLD = CURRENT + 0.4 * torch.randn(MASK.shape, generator=generator)
SAMPLED = OLD + 0.3 * torch.randn(MASK.shape, generator=generator)
REFERENCE = CURRENT + 0.5 * torch.randn(MASK.shape, generator=generator)

SETTINGS = [
    (loss, ratio, aggregation)
    for loss, ratio, aggregation in product(Loss, RatioLevel, Aggregation)
    if loss is not Loss.POLICY_GRADIENT or ratio is RatioLevel.TOKEN
]


def policy_of(logits):
    """Log-probs of the ids and entropies, both with gradient."""
    distribution = logits.log_softmax(-1)
    return distribution.gather(-1, IDS[..., None]).squeeze(-1), -(distribution.exp() * distribution).sum(-1)


def inputs_of(entropies, mask=MASK):
    columns = {Column.OLD_LOGPROBS: OLD, Column.REFERENCE_LOGPROBS: REFERENCE}
    return LossInputs(loss_mask=mask, advantages=ADVANTAGES, sampled_logprobs=SAMPLED, entropies=entropies, columns=columns)


def method_of(loss, ratio, mismatch=Mismatch.OFF, kl=None, **settings):
    if mismatch is not Mismatch.OFF:
        settings |= {"mismatch": mismatch, "mismatch_cap": CAP}
    if kl is not None:
        settings |= {"kl_estimator": kl, "kl_coefficient": KL_COEFFICIENT}
    return GRPO(loss=loss, ratio=ratio, entropy_coefficient=ENTROPY_COEFFICIENT, **settings)


def plain_loss(logits, loss, ratio, aggregation, mismatch, kl, dual_clip):
    tokens_of = [[column for column in range(MASK.shape[1]) if MASK[row, column]] for row in range(len(MASK))]
    terms = {}
    for row, columns in enumerate(tokens_of):
        distributions = {column: torch.log_softmax(logits[row, column].double(), 0) for column in columns}
        now = {column: distributions[column][IDS[row, column]] for column in columns}
        old = {column: OLD[row, column].double() for column in columns}
        weight_of_row = 1.0
        for column in columns:
            weight_of_row *= math.exp(OLD[row, column].item() - SAMPLED[row, column].item())
        for column in columns:
            moved = now[column] - old[column]
            if ratio is not RatioLevel.TOKEN:  # GSPO-token: the value is the row's, the gradient the token's
                own = now[column] - now[column].item()
                total = sum(now[each].item() - old[each].item() for each in columns)
                is_mean = ratio is RatioLevel.SEQUENCE
                moved = total / len(columns) + own if is_mean else total + len(columns) * own
            from_reference = now[column] - REFERENCE[row, column].double()
            advantage = ADVANTAGES[row, column].item()
            r = torch.exp(moved)
            if loss is Loss.STOP_GRADIENT_CLIP and r.item() > 1 + CLIP_HIGH and advantage > 0:
                gain = (1 + CLIP_HIGH) / r.item() * r * advantage
            elif loss in (Loss.CLIP, Loss.STOP_GRADIENT_CLIP):
                bounded = min(max(r.item(), 1 - CLIP_LOW), 1 + CLIP_HIGH)
                gain = r * advantage if r.item() * advantage <= bounded * advantage else torch.tensor(bounded * advantage)
                if dual_clip is not None and advantage < 0 and gain.item() < dual_clip * advantage:
                    gain = torch.tensor(dual_clip * advantage)
            elif loss is Loss.NO_CLIP:
                gain = r * advantage
            elif loss is Loss.CISPO:
                gain = min(max(r.item(), 1 - CLIP_LOW), 1 + CLIP_HIGH) * advantage * now[column]
            else:
                gain = advantage * now[column]
            weight = 1.0
            if mismatch is not Mismatch.OFF:
                is_of_row = "sequence" in mismatch.value
                weight = weight_of_row if is_of_row else math.exp(OLD[row, column].item() - SAMPLED[row, column].item())
                if weight > CAP:
                    weight = 0.0 if "mask" in mismatch.value else CAP
            term = -weight * gain
            if kl is KLEstimator.K1:
                term = term + KL_COEFFICIENT * from_reference
            elif kl is KLEstimator.K2:
                term = term + KL_COEFFICIENT * from_reference**2 / 2
            elif kl is KLEstimator.K3:
                term = term + KL_COEFFICIENT * (torch.exp(-from_reference) + from_reference - 1)
            distribution = distributions[column]
            entropy = -sum(torch.exp(distribution[token]) * distribution[token] for token in range(VOCABULARY))
            terms[row, column] = term - ENTROPY_COEFFICIENT * entropy
    return average(terms, tokens_of, aggregation)


def average(terms, tokens_of, aggregation):
    of_row = [[terms[row, column] for column in columns] for row, columns in enumerate(tokens_of)]
    rows = [row for row in of_row if row]
    if aggregation is Aggregation.TOKEN_MEAN:
        return sum(term for row in rows for term in row) / sum(len(row) for row in rows)
    if aggregation is Aggregation.SEQUENCE_MEAN:
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    if aggregation is Aggregation.CONSTANT:
        return sum(sum(row) / CONSTANT for row in rows) / len(rows)
    of_group = [[term for row, group in zip(of_row, GROUPS, strict=True) if group == each for term in row] for each in (0, 1)]
    return sum(sum(group) / len(group) for group in of_group) / 2


def update_loss(logits, method, aggregation):
    logprobs, entropies = policy_of(logits)
    constant = CONSTANT if aggregation is Aggregation.CONSTANT else None
    weights = token_weights(MASK, torch.tensor(GROUPS), aggregation, constant=constant)
    return (weights * method.token_loss(logprobs, inputs_of(entropies))).sum()


@pytest.mark.parametrize(("loss", "ratio", "aggregation"), SETTINGS)
def test_loss_and_gradient_are_those_of_the_formulas_off_policy(loss, ratio, aggregation):
    dual_clips = [None, 1.3] if loss in (Loss.CLIP, Loss.STOP_GRADIENT_CLIP) else [None]
    # Aggregation weighs the losses of tokens, whatever they consist of: it needs no product with every other setting.
    is_mean = aggregation is Aggregation.TOKEN_MEAN
    mismatches, estimators = (list(Mismatch), [None, *KLEstimator]) if is_mean else ([Mismatch.MASK_TOKEN], [KLEstimator.K3])
    for mismatch, kl, dual_clip in product(mismatches, estimators, dual_clips):
        expected_logits = LOGITS.clone().requires_grad_()
        expected = plain_loss(expected_logits, loss, ratio, aggregation, mismatch, kl, dual_clip)
        expected.backward()
        logits = LOGITS.clone().requires_grad_()
        clip = {} if dual_clip is None else {"dual_clip": dual_clip}
        found = update_loss(logits, method_of(loss, ratio, mismatch, kl, **clip), aggregation)
        found.backward()
        where = f"{mismatch}, {kl}, dual clip {dual_clip}"
        assert found.item() == pytest.approx(expected.item(), rel=1e-5, abs=1e-6), where
        assert (logits.grad - expected_logits.grad).norm() <= 1e-5 * expected_logits.grad.norm(), where


def test_the_batch_above_reaches_every_branch_of_the_formulas():
    logprobs, entropies = policy_of(LOGITS)
    settings = {"mismatch": Mismatch.MASK_TOKEN, "mismatch_cap": CAP, "dual_clip": 1.3}
    figures = GRPO(**settings).token_statistics(logprobs, inputs_of(entropies))
    for name in ("clip_fraction_low", "clip_fraction_high", "clip_fraction_dual", "mismatch_over_cap_fraction"):
        assert 0 < figures[name].sum() < MASK.sum(), name
    by_row = GRPO(mismatch=Mismatch.MASK_SEQUENCE, mismatch_cap=CAP, ratio=RatioLevel.SEQUENCE)
    figures = by_row.token_statistics(logprobs, inputs_of(entropies))
    assert 0 < figures["mismatch_over_cap_fraction"].sum() < MASK.sum()
    assert figures["clip_fraction_low"].any()
    assert figures["clip_fraction_high"].any()


METHODS = [
    pytest.param(method_of(loss, ratio, mismatch, kl), id=f"{loss}-{ratio}-{mismatch}")
    for (loss, ratio), (mismatch, kl) in product(
        dict.fromkeys((loss, ratio) for loss, ratio, _ in SETTINGS),
        [(Mismatch.OFF, None), (Mismatch.MASK_TOKEN, KLEstimator.K1), (Mismatch.TRUNCATE_SEQUENCE, KLEstimator.K3)],
    )
]


@pytest.mark.parametrize("hole", [math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_masked_tokens_change_neither_loss_nor_gradient_nor_figures_whatever_they_hold(method, hole):
    def everything(fill):
        def dirty(values):
            return values.clone() if fill is None else values.masked_fill(~MASK, fill)

        policy, entropies = (dirty(values).requires_grad_() for values in policy_of(LOGITS))
        inputs = LossInputs(
            loss_mask=MASK,
            advantages=dirty(ADVANTAGES),
            sampled_logprobs=dirty(SAMPLED),
            entropies=entropies,
            columns={Column.OLD_LOGPROBS: dirty(OLD), Column.REFERENCE_LOGPROBS: dirty(REFERENCE)},
        )
        loss = method.token_loss(policy, inputs)
        loss.sum().backward()
        return {"loss": loss.detach(), "policy": policy.grad, "entropies": entropies.grad} | method.token_statistics(
            policy.detach(), inputs
        )

    expected, found = everything(None), everything(hole)
    for name, values in expected.items():
        assert torch.equal(found[name], values), name
        assert not values[~MASK].any(), name
        assert values.shape == MASK.shape


@pytest.mark.parametrize("method", METHODS)
def test_rows_in_parts_of_any_width_add_up_to_the_gradient_of_the_whole(method):
    weights = token_weights(MASK, torch.tensor(GROUPS), Aggregation.GROUP_TOKEN_MEAN)
    whole = LOGITS.clone().requires_grad_()
    update_loss(whole, method, Aggregation.GROUP_TOKEN_MEAN).backward()
    parts = LOGITS.clone().requires_grad_()
    for rows, width in (([1, 4], 4), ([3], 6), ([2, 0], 6)):

        def cut(values, rows=rows, width=width):
            return values[rows, :width]

        logprobs, entropies = policy_of(parts)
        inputs = LossInputs(
            loss_mask=cut(MASK),
            advantages=cut(ADVANTAGES),
            sampled_logprobs=cut(SAMPLED),
            entropies=cut(entropies),
            columns={Column.OLD_LOGPROBS: cut(OLD), Column.REFERENCE_LOGPROBS: cut(REFERENCE)},
        )
        (cut(weights) * method.token_loss(cut(logprobs), inputs)).sum().backward()
    assert (parts.grad - whole.grad).norm() <= 2e-6 * whole.grad.norm()
