import math

import pytest
import torch

from strop.algorithms.grpo import GRPO
from strop.algorithms.grpo_roc import GRPORoC
from strop.algorithms.losses import Mismatch, RatioLevel
from strop.algorithms.method import Column, LossInputs, Method
from strop.algorithms.policy_loss import Loss

ROW = torch.tensor([[True, True]])


def inputs_of(old, *, advantages=1.0, sampled=None, reference=None, entropies=0.0):
    """One row of as many tokens as `old` has values; the others are values or one value for all tokens."""

    def row(values):
        return torch.tensor(values if isinstance(values, list) else [values] * len(old))[None]

    columns = {Column.OLD_LOGPROBS: row(old)}
    if reference is not None:
        columns[Column.REFERENCE_LOGPROBS] = row(reference)
    return LossInputs(
        loss_mask=torch.ones(1, len(old), dtype=torch.bool),
        advantages=row(advantages),
        sampled_logprobs=row(old if sampled is None else sampled),
        entropies=row(entropies),
        columns=columns,
    )


@pytest.mark.parametrize(
    ("settings", "needs"),
    [
        ({}, {Column.OLD_LOGPROBS}),
        ({"kl_coefficient": 0.001}, {Column.OLD_LOGPROBS, Column.REFERENCE_LOGPROBS}),
        ({"loss": Loss.POLICY_GRADIENT}, set()),  # on policy: no ratio, so no old log-probs are paid for
        ({"loss": Loss.POLICY_GRADIENT, "kl_coefficient": 0.001}, {Column.REFERENCE_LOGPROBS}),
        ({"loss": Loss.POLICY_GRADIENT, "mismatch": Mismatch.MASK_TOKEN}, {Column.OLD_LOGPROBS}),
        ({"loss": Loss.CISPO}, {Column.OLD_LOGPROBS}),
    ],
)
def test_only_the_columns_that_a_setting_reads_are_needed(settings, needs):
    assert GRPO(**settings).needs == needs
    assert GRPORoC(**settings).needs == needs


def test_the_reference_is_needed_only_where_kl_is_paid_for():
    assert Column.REFERENCE_LOGPROBS not in GRPO().needs
    assert Column.REFERENCE_LOGPROBS in GRPO(kl_coefficient=0.001).needs


def test_kl_is_added_to_the_loss_of_the_token():
    policy = torch.tensor([[-1.0]])
    inputs = inputs_of([-1.0], reference=[-1.0 + math.log(2)])
    # -1 (on policy, A = 1) + 0.5 * (2 - ln 2 - 1)
    assert GRPO(kl_coefficient=0.5).token_loss(policy, inputs).item() == pytest.approx(-1 + 0.5 * 0.306853, abs=1e-6)


def test_the_entropy_bonus_lowers_the_loss_and_its_gradient_reaches_the_entropies():
    entropies = torch.tensor([[1.5, 0.5]], requires_grad=True)
    inputs = LossInputs(
        loss_mask=torch.tensor([[True, False]]),
        advantages=torch.ones(1, 2),
        sampled_logprobs=torch.zeros(1, 2),
        entropies=entropies,
        columns={Column.OLD_LOGPROBS: torch.zeros(1, 2)},
    )
    loss = GRPO(entropy_coefficient=0.1).token_loss(torch.zeros(1, 2), inputs)
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([-1.15, 0.0], abs=1e-6)
    assert entropies.grad[0].tolist() == pytest.approx([-0.1, 0.0], abs=1e-6)


def test_gspo_clips_a_whole_row_by_its_geometric_mean():
    """Ratios 2 and 0.8 have the mean 1.2649, past 1.25: by token only the first would be clipped."""
    policy = torch.tensor([[2.0, 0.8]]).log().requires_grad_()
    loss = GRPO(ratio=RatioLevel.SEQUENCE, clip_high=0.25).token_loss(policy, inputs_of([0.0, 0.0]))
    loss.sum().backward()
    assert loss[0].tolist() == pytest.approx([-1.25, -1.25], abs=1e-6)
    assert policy.grad[0].tolist() == [0.0, 0.0]


def test_the_mismatch_weighs_the_surrogate_and_not_the_kl():
    # π_old / π_sampled is 4, cut to 2; on policy with A = 1 the surrogate is -1; k3 of a reference twice as likely.
    method = GRPO(mismatch=Mismatch.TRUNCATE_TOKEN, kl_coefficient=1.0)
    inputs = inputs_of([-1.0], sampled=[-1.0 - math.log(4)], reference=[-1.0 + math.log(2)])
    assert method.token_loss(torch.tensor([[-1.0]]), inputs).item() == pytest.approx(-2 + 1 - math.log(2), abs=1e-6)


def test_clip_fractions_count_the_tokens_whose_gradient_was_taken_away():
    policy = torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log()
    inputs = inputs_of([0.0] * 4, advantages=[1.0, -1.0, 1.0, -1.0], sampled=0.25)
    figures = GRPO(clip_low=0.2, clip_high=0.2, dual_clip=1.4).token_statistics(policy, inputs)
    assert figures["clip_fraction_high"][0].tolist() == [1, 0, 0, 0]
    assert figures["clip_fraction_low"][0].tolist() == [0, 0, 0, 1]
    assert figures["clip_fraction_dual"][0].tolist() == [0, 1, 0, 0]
    assert figures["ratio"][0].tolist() == pytest.approx([1.5, 1.5, 0.5, 0.5], abs=1e-6)
    assert figures["sampler_gap_nats"][0].tolist() == [0.25] * 4
    # k3 of the log-ratio -0.25
    assert figures["sampler_kl_nats"][0].tolist() == pytest.approx([math.exp(-0.25) + 0.25 - 1] * 4, rel=1e-5)
    assert figures["sampler_ratio"][0].tolist() == pytest.approx([math.exp(-0.25)] * 4, abs=1e-6)
    assert figures["old_kl_nats"][0, 0].item() == pytest.approx(1.5 - math.log(1.5) - 1, abs=1e-6)


@pytest.mark.parametrize(
    ("loss", "low", "high"),
    [
        ("cispo", [0, 0, 1, 1], [1, 1, 0, 0]),
        ("no_clip", [0] * 4, [0] * 4),
        ("stop_gradient_clip", [0, 0, 0, 1], [1, 0, 0, 0]),
    ],
)
def test_clip_fractions_of_other_losses_say_where_a_weight_was_held(loss, low, high):
    policy = torch.tensor([[1.5, 1.5, 0.5, 0.5]]).log()
    figures = GRPO(loss=Loss(loss)).token_statistics(policy, inputs_of([0.0] * 4, advantages=[1.0, -1.0, 1.0, -1.0]))
    assert figures["clip_fraction_low"][0].tolist() == low
    assert figures["clip_fraction_high"][0].tolist() == high


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": Loss.NO_CLIP, "mismatch": Mismatch.MASK_TOKEN},
        {"loss": Loss.NO_CLIP, "high_entropy_share": 0.5, "high_entropy_over": "row"},
    ],
)
def test_an_infinite_ratio_on_a_token_that_is_left_out_changes_nothing(settings):
    policy = torch.tensor([[-1.0, -1.0]], requires_grad=True)
    inputs = inputs_of([-100.0, -1.0], sampled=[-200.0, -1.0], entropies=[0.1, 0.9])  # e^99 is no float32
    loss = GRPO(**settings).token_loss(policy, inputs)
    loss.sum().backward()
    assert loss.tolist() == [[0.0, -1.0]]
    assert policy.grad.tolist() == [[0.0, -1.0]]


@pytest.mark.parametrize("mismatch", [Mismatch.TRUNCATE_SEQUENCE, Mismatch.MASK_SEQUENCE])
def test_a_mismatch_by_row_reports_the_rows_own_log_ratio_uncapped(mismatch):
    inputs = inputs_of([-1.0, -2.0], sampled=[-1.5, -3.0])
    statistics = GRPO(mismatch=mismatch).token_statistics(torch.tensor([[-1.0, -2.0]]), inputs)
    assert statistics["sampler_row_log_ratio"].tolist() == [[1.5, 1.5]]
    assert statistics["mismatch_over_cap_fraction"].tolist() == [[1.0, 1.0]]  # e^1.5 is more than 2


def test_a_mismatch_reports_its_weights_and_the_share_that_was_over_the_cap():
    method = GRPO(mismatch=Mismatch.MASK_TOKEN)
    figures = method.token_statistics(torch.zeros(1, 2), inputs_of([0.0, 0.0], sampled=[-math.log(4), -math.log(1.5)]))
    assert figures["sampler_ratio"][0].tolist() == pytest.approx([4, 1.5], abs=1e-6)
    assert figures["mismatch_weight"][0].tolist() == pytest.approx([0, 1.5], abs=1e-6)
    assert figures["mismatch_over_cap_fraction"][0].tolist() == [1, 0]


def test_without_old_logprobs_the_gap_to_the_sampler_is_that_of_the_policy_itself():
    inputs = LossInputs(
        loss_mask=ROW,
        advantages=torch.ones(1, 2),
        sampled_logprobs=torch.tensor([[-1.5, -2.0]]),
        entropies=torch.zeros(1, 2),
        columns={},
    )
    figures = GRPO(loss=Loss.POLICY_GRADIENT).token_statistics(torch.tensor([[-1.0, -2.0]]), inputs)
    assert figures["ratio"][0].tolist() == [1, 1]
    assert figures["sampler_gap_nats"][0].tolist() == [0.5, 0]


def test_a_setting_written_down_at_its_default_is_no_mistake():
    """A run saves every setting that it resolved, and reads them back."""
    method = GRPO(loss=Loss.POLICY_GRADIENT)
    assert Method.of(method.table()) == method


@pytest.mark.parametrize(
    ("settings", "num_updates", "is_noted"),
    [({}, 1, True), ({}, 4, False), ({"loss": Loss.CISPO}, 1, True), ({"loss": Loss.NO_CLIP}, 1, False)],
)
def test_the_plan_says_where_clipping_has_no_effect(settings, num_updates, is_noted):
    """The ratio of the only update after sampling is 1."""
    assert ["clipping has no effect" in note for note in GRPO(**settings).notes(num_updates)] == [True] * is_noted
