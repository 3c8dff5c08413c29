from collections import Counter
from dataclasses import replace
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.algorithms.grpo_roc import GRPORoC, draw_order, error_ratio, error_ratio_in_text, format_penalty
from strop.types import Group, RolloutKey, ScoredTrajectory, StopReason, Task, ToolOutcome, Trajectory

OK, BAD = ToolOutcome.STDOUT, ToolOutcome.ERROR


@pytest.mark.parametrize(
    ("outcomes", "expected"),
    [
        ([], 0.5),  # no call: encouraged to make one
        ([OK, BAD, OK, ToolOutcome.EMPTY], 0.25),
        ([ToolOutcome.MALFORMED], 1.0),  # counts as a call, and as an error
        ([ToolOutcome.TIMEOUT, ToolOutcome.UNKNOWN_TOOL, OK, ToolOutcome.ECHO], 0.5),
        ([OK, BAD, ToolOutcome.NOT_RUN], 0.5),  # nothing came of the last one
        ([ToolOutcome.NOT_RUN], 0.5),  # as without a call
        ([OK, *[ToolOutcome.TOO_MANY_CALLS] * 3], 0.0),  # no mistake of Eq. 4
        ([BAD, *[ToolOutcome.TOO_MANY_CALLS] * 3], 1.0),  # and nothing that thins mistakes out
    ],
)
def test_p_err_is_the_share_of_calls_that_went_wrong(make_trajectory, outcomes, expected):
    assert error_ratio(make_trajectory([("", outcomes)])) == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["no tag"], 1.0),
        (["<answer>1</answer>"], 0.0),
        (["<answer>1</answer>", "", "", "<answer>2</answer>"], 0.25),  # (2 - 1) / 4 turns
        (["<answer>1</answer>" * 5], 1.0),  # (5 - 1) / 1 turn, at most 1
        (["<answer>1"], 1.0),  # unbalanced
        (["<answer>1</answer></answer>"], 1.0),
        (["<answer>", "1</answer>"], 0.0),  # balanced over turns
        ([], 1.0),
    ],
)
def test_p_format_counts_answer_tags_that_the_policy_wrote(make_trajectory, texts, expected):
    assert format_penalty(make_trajectory([(text, ()) for text in texts])) == expected


def _with_responses(make_trajectory, *responses):
    """A trajectory whose turns have these tool responses; None for a call of a turn that was not answered."""
    made = make_trajectory([("", [OK]) for _ in responses])
    turns = [
        replace(turn, calls=(replace(turn.calls[0], text=text or ""),), observation_ids=() if text is None else (3,))
        for turn, text in zip(made.turns, responses, strict=True)
    ]
    return replace(made, turns=tuple(turns))


@pytest.mark.parametrize(
    ("responses", "expected"),
    [
        ([], 0.5),
        (["5", "NameError: x", "no ERRORS found", "Tool call failure"], 0.5),  # two of four; only the word counts
        (["5", None], 0.0),  # the last call was not answered
        ([None], 0.5),
    ],
)
def test_the_released_p_err_is_the_share_of_responses_with_the_word(make_trajectory, responses, expected):
    assert error_ratio_in_text(_with_responses(make_trajectory, *responses)) == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["<answer>1</answer>"], 1.0),  # its only turn begins in the prompt
        (["", "<answer>1</answer>"], 0.0),
        (["<answer>1</answer>", "", "", "<answer>2</answer>"], 1 / 3),  # (2 - 1) / (4 - 1)
        (["", "<answer>1</answer>" * 5], 1.0),
        (["", "no tag"], 1.0),
    ],
)
def test_the_released_p_format_divides_by_the_turns_after_the_first(make_trajectory, texts, expected):
    assert format_penalty(make_trajectory([(text, ()) for text in texts]), counts_first_turn=False) == pytest.approx(expected)


def test_the_released_penalties_are_settings_of_the_method(make_group):
    group = make_group([1.0, 1.0, 0.0, 0.0])
    singles = [
        replace(each, trajectory=replace(each.trajectory, turns=each.trajectory.turns[1:])) for each in group.trajectories
    ]
    for keys, found in (({}, (0.5, 0.0)), ({"turns": "later"}, (0.5, 1.0))):
        selection = GRPORoC(**keys).select(replace(group, trajectories=tuple(singles)), group_size=2, seed=0)
        assert {(each.figures["p_err"], each.figures["p_format"]) for each in selection.decisions} == {found}
    selection = GRPORoC(errors="text").select(group, group_size=2, seed=0)  # no response was shown
    assert {each.figures["p_err"] for each in selection.decisions} == {0.5}
    assert {each.figures["p_err"] for each in GRPORoC().select(group, group_size=2, seed=0).decisions} == {0.0}


def test_positives_are_drawn_without_replacement_in_proportion_to_their_weights():
    """10 000 draws of weights 4, 2, 1 against the six ordered probabilities, worked out by hand."""
    expected = {
        (0, 1, 2): 4 / 7 * 2 / 3,
        (0, 2, 1): 4 / 7 * 1 / 3,
        (1, 0, 2): 2 / 7 * 4 / 5,
        (1, 2, 0): 2 / 7 * 1 / 5,
        (2, 0, 1): 1 / 7 * 4 / 6,
        (2, 1, 0): 1 / 7 * 2 / 6,
    }
    keys = [RolloutKey(task_index=0, attempt=attempt) for attempt in range(3)]
    counts = Counter(tuple(draw_order([4, 2, 1], keys, seed)) for seed in range(10_000))
    for order in permutations(range(3)):
        assert counts[order] / 10_000 == pytest.approx(expected[order], abs=0.02)  # 4 standard deviations


def test_a_flawless_rollout_weighs_one_over_eps_and_the_figures_say_why_it_was_kept(make_group):
    group = make_group([1, 1, 0, 0], errors=[0, 1, 0, 4])
    selection = GRPORoC().select(group, group_size=2, seed=3)
    assert len(selection.kept) == 2
    first, second, third, _ = (dict(decision.figures) for decision in selection.decisions)
    assert (first["p_err"], first["p_format"]) == (0.0, 0.0)
    assert first["weight"] == pytest.approx(100.0)  # 1 / (0 + 0.01)
    assert second["weight"] == pytest.approx(1 / 0.26)  # 1 / (1/4 + 0.01)
    assert third["weight"] == 1.0  # wrong rollouts are drawn uniformly
    assert {first["draw_order"], second["draw_order"]} == {1.0, 2.0}
    kept = next(decision for decision in selection.decisions if decision.is_kept and decision.figures["weight"] != 1.0)
    assert kept.reason.startswith("kept: correct, draw 1 of 2 (1 kept), p_err 0.")


@pytest.mark.parametrize(
    ("num_positives", "num_rollouts", "group_size", "positives_kept"),
    [
        (4, 8, 4, 2),  # halves
        (3, 8, 4, 2),  # floor(5 * 4 / 8) = 2 negatives, the rest positives
        (7, 8, 4, 4),  # floor(1 * 4 / 8) = 0 negatives
        (2, 9, 3, 1),  # three times the group: floor(7 * 3 / 9) = 2 negatives
    ],
)
def test_negatives_keep_their_share_rounded_down_and_positives_fill_the_group(
    make_group, num_positives, num_rollouts, group_size, positives_kept
):
    method = GRPORoC(oversample=num_rollouts / group_size, drop_tied=False)
    group = make_group([1.0] * num_positives + [0.0] * (num_rollouts - num_positives))
    kept = method.select(group, group_size=group_size, seed=0).kept
    assert [scored.reward for scored in kept].count(1.0) == positives_kept
    assert len(kept) == group_size


@pytest.mark.parametrize(
    ("num_positives", "positives_kept"),
    [
        (1, 1),  # fewer than the floor: take all, fill with the other side
        (2, 2),  # in proportion it would be 1
        (14, 6),  # in proportion it would be 7 or 8; 2 negatives are kept
        (15, 7),  # the one negative there is
        (8, 4),  # floors do not bind
    ],
)
def test_the_released_floors_keep_two_of_the_minority_where_there_are_two(make_group, num_positives, positives_kept):
    method = GRPORoC(min_positives=2, min_negatives=2)
    group = make_group([1.0] * num_positives + [0.0] * (16 - num_positives))
    kept = method.select(group, group_size=8, seed=0).kept
    assert [scored.reward for scored in kept].count(1.0) == positives_kept
    assert len(kept) == 8


def test_greedy_keeps_the_cleanest_and_breaks_ties_by_seed(make_group):
    group = make_group([1, 1, 1, 1, 0, 0, 0, 0], errors=[2, 0, 1, 3, 0, 0, 0, 0])
    for seed in range(20):
        selection = GRPORoC(selection="greedy").select(group, group_size=4, seed=seed)
        assert [decision.is_kept for decision in selection.decisions[:4]] == [False, True, True, False]
    alike = make_group([1, 1, 1, 1, 0, 0, 0, 0])
    assert len({tuple(decision.is_kept for decision in _greedy(alike, seed).decisions[:4]) for seed in range(50)}) > 3


def _greedy(group, seed):
    return GRPORoC(selection="greedy").select(group, group_size=4, seed=seed)


@pytest.mark.parametrize(("reward", "side"), [(0.0, "wrong"), (1.0, "right")])
def test_a_tied_group_is_dropped_before_selection(make_group, reward, side):
    selection = GRPORoC().select(make_group([reward] * 8), group_size=4, seed=0)
    assert selection.kept == ()
    assert selection.decisions[0].reason == f"dropped: tied group, all {side} (reward {reward:g})"
    assert "p_err" in selection.decisions[0].figures


def test_a_group_that_selection_ties_is_dropped_after_it(make_group):
    # floor(1 * 4 / 8) = 0 negatives: four positives are left.
    selection = GRPORoC().select(make_group([1.0] * 7 + [0.0]), group_size=4, seed=0)
    assert selection.kept == ()
    assert selection.decisions[0].reason == "dropped: after selection a tied group, all right (reward 1)"


def test_without_oversampling_nothing_is_resampled(make_group):
    group = make_group([1, 1, 0, 0], errors=[4, 0, 4, 0])
    assert GRPORoC(oversample=1).num_rollouts(4) == 4
    assert len(GRPORoC(oversample=1).select(group, group_size=4, seed=0).kept) == 4


@pytest.mark.parametrize(("num_left", "num_kept"), [(8, 4), (7, 3), (5, 2), (4, 2), (3, 0)])
def test_voids_shrink_the_group_in_proportion_and_below_two_it_is_dropped(make_group, num_left, num_kept):
    group = make_group([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0][:num_left])
    selection = GRPORoC(drop_tied=False).select(group, group_size=4, seed=0)  # 8 were asked for
    assert len(selection.kept) == num_kept
    if num_kept == 0:
        assert "only 3 of 8 rollouts are left" in selection.decisions[0].reason


def test_the_noise_of_a_rollout_does_not_depend_on_the_others():
    keys = [RolloutKey(task_index=2, attempt=attempt) for attempt in range(6)]
    whole = [keys[index] for index in draw_order([1.0] * 6, keys, seed=11)]
    some = list(reversed(keys[1:5]))
    part = [some[index] for index in draw_order([1.0] * 4, some, seed=11)]
    assert part == [key for key in whole if key in some]


def test_advantages_compare_what_was_kept(make_group):
    """rStar2-Agent Eq. 7: 8 rollouts with 6 positives leave 3 and 1; mean 0.75, std 0.5."""
    method = GRPORoC(eps=0.0)
    selection = method.select(make_group([1.0] * 6 + [0.0] * 2), group_size=4, seed=0)
    [advantages] = method.advantages([selection])
    assert [of_tokens[0].item() for of_tokens in advantages] == pytest.approx([0.5, 0.5, 0.5, -1.5])


@given(
    rewards=st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=12),
    group_size=st.integers(2, 6),
    floors=st.tuples(st.integers(0, 3), st.integers(0, 3)),
    seed=st.integers(0, 2**62),
)
def test_any_group_keeps_exactly_its_number_or_nothing(rewards, group_size, floors, seed):
    method = GRPORoC(oversample=2, min_positives=floors[0], min_negatives=floors[1], drop_tied=False)
    group = _plain_group(rewards)
    kept = method.select(group, group_size=group_size, seed=seed).kept
    expected = group_size * min(len(rewards), 2 * group_size) // (2 * group_size)
    assert len(kept) == (expected if expected >= 2 else 0)


def _plain_group(rewards):
    scored = []
    for attempt, reward in enumerate(rewards):
        trajectory = Trajectory(
            key=RolloutKey(task_index=0, attempt=attempt), task_id="t", prompt_ids=(1,), turns=(), stop_reason=StopReason.LENGTH
        )
        scored.append(ScoredTrajectory(trajectory=trajectory, reward=reward, reward_parts={}))
    return Group(task=Task(id="t", question="?", answer="1", source="by hand"), task_index=0, trajectories=tuple(scored))


def test_of_three_positives_the_kept_pair_comes_as_often_as_worked_out_by_hand(make_group):
    """p_err 0, 1/4 and 1/2 weigh 1/0.5, 1/0.75 and 1: 2, 4/3 and 1 of 13/3. Each pair is drawn in one order or the other."""
    method = GRPORoC(eps_roc=0.5, oversample=1.5)  # 6 sampled, 4 kept: floor(3 * 4 / 6) = 2 negatives, 2 positives
    group = make_group([1, 1, 1, 0, 0, 0], errors=[0, 1, 2, 0, 2, 4])
    first, second, third = 6 / 13, 4 / 13, 3 / 13
    expected = {
        (0, 1): first * second / (1 - first) + second * first / (1 - second),
        (0, 2): first * third / (1 - first) + third * first / (1 - third),
        (1, 2): second * third / (1 - second) + third * second / (1 - third),
    }
    positives, negatives = Counter(), Counter()
    for seed in range(10_000):
        decisions = method.select(group, group_size=4, seed=seed).decisions
        positives[tuple(row for row in range(3) if decisions[row].is_kept)] += 1
        negatives[tuple(row for row in range(3, 6) if decisions[row].is_kept)] += 1
    for pair, probability in expected.items():
        assert positives[pair] / 10_000 == pytest.approx(probability, abs=0.02)  # 4 standard deviations
    for pair in ((3, 4), (3, 5), (4, 5)):  # whatever their errors
        assert negatives[pair] / 10_000 == pytest.approx(1 / 3, abs=0.02)


@pytest.mark.parametrize(
    ("num_positives", "rounding", "positives_kept"),
    [
        (17, "floor", 9),  # 15 * 16 / 32 = 7.5 negatives become 7
        (17, "half_even", 8),  # and 8 in the released code
        (15, "floor", 8),  # 8.5 become 8
        (15, "half_even", 8),
        (11, "half_even", 6),  # 10.5 become 10
    ],
)
def test_half_a_rollout_is_rounded_down_or_as_the_released_code_does(make_group, num_positives, rounding, positives_kept):
    group = make_group([1.0] * num_positives + [0.0] * (32 - num_positives))
    kept = GRPORoC(quota_rounding=rounding).select(group, group_size=16, seed=0).kept
    assert [scored.reward for scored in kept].count(1.0) == positives_kept
    assert len(kept) == 16


def test_every_rollouts_penalties_weight_place_and_reason_are_recorded_kept_or_not(make_group):
    group = make_group([1, 1, 0, 0], errors=[0, 1, 0, 4])
    tied = make_group([1, 1, 1, 1])
    for each in (group, tied):
        for decision in GRPORoC().select(each, group_size=2, seed=1).decisions:
            assert set(decision.figures) == {"p_err", "p_format", "weight", "draw_order"}
            assert decision.reason.startswith(("kept: ", "dropped: "))


def test_repetition_counts_only_where_it_has_a_weight(make_group, monkeypatch):
    monkeypatch.setattr("strop.algorithms.grpo_roc.REPETITION_NGRAM", 2)
    group = make_group([1, 1, 0, 0])  # every completion is the tokens 8 9, and has one pair of them
    plain, weighed = (
        GRPORoC(repetition_weight=weight).select(group, group_size=2, seed=0).decisions[0].figures for weight in (0.0, 1.0)
    )
    assert plain["weight"] == pytest.approx(100.0)
    assert "p_repeat" not in plain
    assert weighed["p_repeat"] == 0.5  # the second turn repeats the first: one different pair of two
    assert weighed["weight"] == pytest.approx(1 / 0.51)


def test_ties_before_and_after_selection_may_be_judged_by_a_part(make_group):
    group = make_group([2.0, 1.5, 1.0, 2.0])
    right = tuple(replace(each, reward_parts={"accuracy": 1.0}) for each in group.trajectories)
    assert len(GRPORoC(oversample=1).select(replace(group, trajectories=right), group_size=4, seed=0).kept) == 4
    method = GRPORoC(oversample=1, tied_by="accuracy")
    before = method.select(replace(group, trajectories=right), group_size=4, seed=0)
    assert {each.reason for each in before.decisions} == {"dropped: tied group, all right (accuracy 1)"}
    # 1 of 4 is wrong: floor(1 * 2 / 4) = 0 negatives are drawn, so that of two kept rollouts both are right.
    mixed = (*right[:3], replace(group.trajectories[3], reward=-1.0, reward_parts={"accuracy": 0.0}))
    after = GRPORoC(tied_by="accuracy").select(replace(group, trajectories=mixed), group_size=2, seed=0)
    assert {each.reason for each in after.decisions} == {"dropped: after selection a tied group, all right (accuracy 1)"}


def test_overlong_filtering_leaves_out_what_was_cut_off_before_anything_is_drawn():
    group = _plain_group([1.0, 1.0, 0.0, 0.0])  # all cut off
    ended = [
        replace(scored, trajectory=replace(scored.trajectory, stop_reason=StopReason.ANSWERED)) for scored in group.trajectories
    ]
    mixed = replace(group, trajectories=(*ended[:3], group.trajectories[3]))
    assert len(GRPORoC(drop_tied=False).select(group, group_size=2, seed=0).kept) == 2
    method = GRPORoC(overlong_filter=True, oversample=1, drop_tied=False)
    assert [decision.is_kept for decision in method.select(mixed, group_size=4, seed=0).decisions] == [True, True, True, False]
    nothing = method.select(group, group_size=4, seed=0)
    assert [decision.reason for decision in nothing.decisions] == ["dropped: cut off, and overlong_filter is on"] * 4
