from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from trees import grow

from strop.algorithms.arpo import repeated_lengths, shared_lengths


def test_a_branch_shares_with_its_parent_what_came_before_its_fork():
    assert shared_lengths(grow([5, 3], {1: (0, 2)})) == [[5, 2], [2, 5]]


def test_rollouts_from_the_prompt_share_nothing_even_if_their_tokens_are_equal():
    one, other = grow([3]), grow([3])
    assert shared_lengths([one[0], grow([3, 3])[1]]) == [[3, 0], [0, 3]]
    assert one[0].ids == other[0].ids


def test_two_branches_of_one_parent_share_up_to_the_earlier_fork():
    assert shared_lengths(grow([6, 1, 1], {1: (0, 2), 2: (0, 4)}))[1][2] == 2


def test_a_branch_of_a_branch_shares_with_its_grandparent_up_to_either_fork():
    assert shared_lengths(grow([6, 4, 1], {1: (0, 3), 2: (1, 5)}))[2][0] == 3
    assert shared_lengths(grow([6, 4, 1], {1: (0, 3), 2: (1, 2)}))[2][0] == 2


def test_branches_of_a_parent_that_is_not_there_still_share():
    tree = grow([6, 1, 1], {1: (0, 2), 2: (0, 4)})
    assert shared_lengths(tree[1:]) == [[3, 2], [2, 5]]


def test_a_shared_token_is_counted_with_the_lowest_key_that_has_it():
    tree = grow([6, 4, 1, 2], {1: (0, 3), 2: (1, 5)})
    assert repeated_lengths(tree) == [0, 3, 5, 0]
    assert repeated_lengths(tree[1:]) == [0, 5, 0]  # the first of those that are left has it


def test_a_branch_shares_with_its_grandparent_through_a_parent_that_is_in_the_tree_alone():
    tree = grow([6, 4, 1], {1: (0, 3), 2: (1, 5)})
    rest = [tree[0], tree[2]]
    assert shared_lengths(rest, tree=tree) == [[6, 3], [3, 6]]
    assert repeated_lengths(rest, tree=tree) == [0, 3]


@st.composite
def trees(draw):
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=7))
    parents, lengths = {}, []
    for row, size in enumerate(sizes):
        fork = 0
        if row and draw(st.booleans()):
            parent = draw(st.integers(0, row - 1))
            fork = draw(st.integers(1, lengths[parent]))
            parents[row] = (parent, fork)
        lengths.append(fork + size)
    return grow(sizes, parents)


@given(trees(), st.data())
def test_what_is_shared_are_the_same_tokens_and_nothing_more_whoever_is_left_out(tree, data):
    """Every token of `grow` is of one rollout alone, so that equal tokens at one place tell who sampled them."""
    rows = data.draw(st.lists(st.sampled_from(tree), unique_by=id), label="learnt from")
    shared = shared_lengths(rows, tree=tree)
    for one, other in product(range(len(rows)), repeat=2):
        same = [a == b for a, b in zip(rows[one].ids[2:], rows[other].ids[2:], strict=False)]
        assert shared[one][other] == (same.index(False) if False in same else len(same))
    distinct = {(place, token) for each in rows for place, token in enumerate(each.ids[2:])}
    assert sum(each.num_response_tokens for each in rows) - sum(repeated_lengths(rows, tree=tree)) == len(distinct)
