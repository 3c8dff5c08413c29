import pytest
from written_rollouts import CALL, rollout

from strop.analysis.statistics import Figures, Part, Position, count

# Ten sampled tokens in three turns, so the top 20 % are two: "hm" with 2.0 and "wrong" with 1.0.
THREE_TURNS = rollout(
    ([("I", 0.1), ("hm", 2.0), *CALL], ["error"]),
    ([("wrong", 1.0), ("!", 0.5)], ["stdout"]),
    ([("so", 0.3), ("<answer>", 0.0), ("4</answer>", 0.6)], []),
)


def entropies(figures, position):
    return [each.entropy_nats for each in figures.window(position)]


def reflecting_offsets(trajectory):
    return [kind.offset for kind in count([trajectory]).tokens if kind.is_reflection]


def test_each_completion_stands_behind_what_its_turn_before_was_answered():
    assert count([THREE_TURNS]).turns == {Position.START: 1, Position.ERROR: 1, Position.SUCCESS: 1}


def test_one_wrong_call_among_right_ones_is_an_error_and_an_observation_without_a_call_is_neither():
    mixed = rollout(([("a", 0.0)], ["stdout", "malformed"]), ([("b", 0.0)], []), ([("c", 0.0)], []))
    assert count([mixed]).turns == {Position.START: 1, Position.ERROR: 1, Position.OTHER: 1}


def test_entropy_of_calls_reasoning_and_answers_is_that_of_their_tokens():
    figures = count([THREE_TURNS])
    assert figures.part(Part.TOOL_CALL).entropy_nats == pytest.approx((0.0 + 0.4 + 0.2) / 3)
    assert figures.part(Part.REASONING).entropy_nats == pytest.approx((0.1 + 2.0 + 1.0 + 0.5 + 0.3) / 5)
    assert figures.part(Part.ANSWER).entropy_nats == pytest.approx((0.0 + 0.6) / 2)
    assert figures.all_tokens.num_tokens == 10


def test_the_top_fifth_is_of_the_whole_rollout_and_counted_where_it_lies():
    figures = count([THREE_TURNS])
    assert figures.all_tokens.num_high == 2
    assert figures.all_tokens.high_entropy_nats == pytest.approx(1.5)
    assert [figures.reasoning(position).num_high for position in Position] == [1, 0, 1, 0]
    assert figures.reasoning(Position.ERROR).high_share == pytest.approx(0.5)
    assert figures.part(Part.TOOL_CALL).num_high == 0


def test_reflection_tokens_are_counted_by_position_and_with_their_words():
    figures = count([THREE_TURNS, THREE_TURNS])
    after_error = figures.reasoning(Position.ERROR)
    assert (after_error.num_reflection, after_error.num_high_reflection, after_error.num_tokens) == (2, 2, 4)
    assert figures.words == {(Position.ERROR, "wrong"): 2}
    assert figures.reasoning(Position.START).num_reflection == 0


def test_a_word_of_reflection_inside_a_call_is_not_one():
    in_call = rollout(([("<tool_call>", 0.0), ("check", 0.0), ("</tool_call>", 0.0), (" check", 0.0)], ["stdout"]))
    assert reflecting_offsets(in_call) == [3]


def test_a_word_that_several_tokens_spell_marks_them_all():
    spelled = rollout(([("I double", 0.0), ("-", 0.0), ("check", 0.0), (".", 0.0)], []))
    assert reflecting_offsets(spelled) == [0, 1, 2]
    assert count([spelled]).words == {(Position.START, "double-check"): 1}


def test_offsets_are_means_over_the_completions_that_reach_them():
    longer = rollout(([("a", 0.5)], ["stdout"]), ([("b", 0.2), ("c", 0.4)], []))
    shorter = rollout(([("a", 0.1)], ["stdout"]), ([("b", 0.8)], []))
    figures = count([longer, shorter])
    assert entropies(figures, Position.START)[:2] == [pytest.approx(0.3), None]
    assert entropies(figures, Position.SUCCESS)[:3] == [pytest.approx(0.5), pytest.approx(0.4), None]
    assert [each.num_tokens for each in figures.window(Position.SUCCESS)[:3]] == [2, 1, 0]
    assert figures.first(Position.SUCCESS).entropy_nats == pytest.approx((0.2 + 0.4 + 0.8) / 3)


def test_offsets_end_at_50_and_statistics_of_parts_do_not():
    figures = count([rollout(([("a", 1.0)] * 51 + [("b", 9.0)], []))])
    assert entropies(figures, Position.START) == [1.0] * 51
    assert figures.all_tokens.num_tokens == 52


def test_forced_tokens_are_neither_counted_nor_ranked_nor_do_they_take_an_offset():
    forced = rollout(([("<reason>", 5.0, "forced"), ("a", 0.1), ("b", 0.2), ("c", 0.3), ("d", 0.4), ("e", 0.5)], []))
    figures = count([forced])
    assert figures.all_tokens.num_tokens == 5
    assert [kind.offset for kind in figures.tokens if kind.is_high] == [4]
    assert entropies(figures, Position.START)[:2] == [0.1, 0.2]


def test_what_a_branch_shares_with_its_parent_counts_once_and_its_own_stands_behind_the_shared_observation():
    shared = ([("a", 3.0), ("b", 0.0), ("c", 0.0)], ["error"])
    parent = rollout(shared, ([("d", 0.0), ("e", 0.0)], []))
    branch = rollout(shared, ([("f", 1.0), ("g", 0.0)], []), branch=1, forked_at=4)  # 3 tokens and their observation
    figures = count([parent, branch])
    assert figures.num_rollouts == 2
    assert figures.all_tokens.num_tokens == 3 + 2 + 2
    assert figures.turns == {Position.START: 1, Position.ERROR: 2}
    # The branch's one mark of five is the 3.0 that it shares: among its own tokens none stands out.
    assert figures.reasoning(Position.ERROR).num_high == 0
    assert figures.reasoning(Position.START).num_high == 1


def test_figures_of_steps_add_up_to_those_of_all_their_rollouts():
    other = rollout(([("but", 0.7), ("x", 0.1), ("y", 0.0), ("z", 0.2), ("w", 0.3)], []))
    assert count([THREE_TURNS]) + count([other]) == count([THREE_TURNS, other])
    assert count([]) + count([other]) == count([other])


def test_a_mean_of_nothing_is_not_zero():
    assert Figures().part(Part.ANSWER).entropy_nats is None
    assert Figures().first(Position.ERROR).entropy_nats is None


def test_the_most_frequent_forking_tokens_come_first_with_their_entropy():
    once = rollout(([("x", 2.0), *[("-", 0.0)] * 4], []))
    twice = rollout(([("y", 0.5), *[("-", 0.0)] * 4], []))
    found = count([once, twice, twice]).forking(5)
    assert [(text, tally.num_tokens, tally.entropy_nats) for text, tally in found] == [("y", 2, 0.5), ("x", 1, 2.0)]
