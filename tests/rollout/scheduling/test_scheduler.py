from __future__ import annotations

from collections import Counter

import pytest

from strop.errors import RequestTooLong, StropError
from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.scheduler import (
    Action,
    CallTools,
    Release,
    Run,
    RunReason,
    Scheduler,
    SchedulerConfig,
    make_scheduler,
)
from strop.types import RolloutKey


def key(task: int, attempt: int, branch: int = 0) -> RolloutKey:
    return RolloutKey(task_index=task, attempt=attempt, branch=branch)


def engine(name: str, *, kv_blocks: int = 20, max_conversations: int = 100, keeps_rollouts: bool = False) -> EngineSpec:
    size = {"kv_blocks": kv_blocks, "block_tokens": 10, "max_conversations": max_conversations}
    return EngineSpec(name=name, keeps_rollouts=keeps_rollouts, **size)


def offer(
    one: Scheduler, task: int, *, num: int = 1, prompt_tokens: int = 30, max_tokens: int = 50, now_s: float = 0.0
) -> list[Action]:
    """Offer the first `num` attempts of a task."""
    size = {"prompt_tokens": prompt_tokens, "max_tokens": max_tokens}
    return [action for attempt in range(num) for action in one.offered(now_s, key(task, attempt), **size)]


def reserved_blocks(one: Scheduler, name: str, *, of: int = 20) -> int:
    """What is reserved on an engine of `of` blocks."""
    return round(one.usage[name].kv_share.changes[-1][1] * of)


def started(actions: list[Action]) -> list[tuple[RolloutKey, str]]:
    return [(action.key, action.engine) for action in actions if isinstance(action, Run)]


def finish(one: Scheduler, who: RolloutKey, *, run: int, num_tokens: int, now_s: float) -> list[Action]:
    """The last completion of a rollout comes back."""
    one.turn_finished(now_s, who, run=run, num_tokens=num_tokens)
    return one.ended(now_s, who)


def scheduler(*engines: EngineSpec, **config: object) -> Scheduler:
    made = make_scheduler(SchedulerConfig.model_validate({"order": "fifo", **config}))
    for spec in engines:
        made.engine_joined(0.0, spec)
    return made


def test_a_groups_prompt_is_counted_once_and_each_rollout_by_the_longest_it_may_become() -> None:
    one = scheduler(engine("a", kv_blocks=20))
    actions = offer(one, 0, num=5, prompt_tokens=35, max_tokens=52)
    # 87 tokens are 9 blocks, 3 of which are whole blocks of the prompt: 3 + 6 + 6 fit in 20, one more does not.
    assert [action for action, _ in started(actions)] == [key(0, 0), key(0, 1)]
    assert reserved_blocks(one, "a") == 15
    assert one.waiting == (key(0, 2), key(0, 3), key(0, 4))


def test_a_rollout_that_fits_nowhere_is_refused_with_the_arithmetic() -> None:
    one = scheduler(engine("a", kv_blocks=7), engine("b", kv_blocks=5))
    with pytest.raises(
        RequestTooLong, match=r"prompt of 30 .* up to 50 are 80 tokens, but the largest engine, a, holds .* up to 70"
    ):
        offer(one, 0)
    assert not one.live
    assert one.ledger.offered == 0


def test_tools_are_called_at_once_and_the_rollout_goes_on_where_it_was() -> None:
    one = scheduler(engine("a"), engine("b"))
    offer(one, 0, num=2)
    assert one.turn_finished(1.0, key(0, 0), run=1, num_tokens=5) == [CallTools(key=key(0, 0))]
    [again] = one.tool_finished(2.0, key(0, 0), num_tokens=4)
    assert again == Run(key=key(0, 0), engine="a", run=2, reason=RunReason.CONTINUE, max_tokens=41)


def test_whatever_ends_a_rollout_the_next_starts_at_once_in_order() -> None:
    one = scheduler(engine("a", kv_blocks=8))
    for task in range(4):
        offer(one, task)
    assert finish(one, key(0, 0), run=1, num_tokens=7, now_s=1.0)[0] == Release(key=key(0, 0), engine="a")
    assert started(one.ended(2.0, key(1, 0))) == [(key(2, 0), "a")]  # from outside, in mid-turn
    one.turn_finished(3.0, key(2, 0), run=1, num_tokens=3)
    assert started(one.ended(4.0, key(2, 0))) == [(key(3, 0), "a")]  # while its tool ran
    finish(one, key(3, 0), run=1, num_tokens=1, now_s=5.0)
    assert reserved_blocks(one, "a") == 0
    assert (one.ledger.offered, one.ledger.ended, one.ledger.sampled_tokens) == (4, 4, 7 + 3 + 1)


def test_the_end_of_a_rollout_that_waits_lets_a_smaller_one_start() -> None:
    one = scheduler(engine("a", kv_blocks=12))
    for task, max_tokens in enumerate((50, 50, 10)):  # 8, 8 and 4 blocks
        offer(one, task, max_tokens=max_tokens)
    assert one.waiting == (key(1, 0), key(2, 0))
    assert started(one.ended(1.0, key(1, 0))) == [(key(2, 0), "a")]


def test_a_group_prefers_the_engine_with_its_prompt_until_that_is_much_fuller() -> None:
    one = scheduler(engine("a", kv_blocks=200), engine("b", kv_blocks=200))
    # The prompt takes 3 blocks, each rollout 5: at 3 + 5 + 5 of 200 engine a is more than 5% fuller than b.
    actions = offer(one, 0, num=4)
    assert [name for _, name in started(actions)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(("num_engines", "group_size"), [(4, 4), (4, 8), (8, 4), (16, 8), (16, 32), (12, 8)])
def test_no_attempt_number_of_all_groups_comes_to_the_same_engines(num_engines: int, group_size: int) -> None:
    engines = [engine(f"e{index}", kv_blocks=400, max_conversations=64) for index in range(num_engines)]
    one = scheduler(*engines)  # a rollout takes 8 or 5 of 400 blocks: four of a group stay together
    num_groups = num_engines
    where = [place for task in range(num_groups) for place in started(offer(one, task, num=group_size))]
    for attempt in range(group_size):
        counts = Counter(name for who, name in where if who.attempt == attempt)
        assert max(counts.values()) <= 2, f"attempt {attempt}: {counts}"


def test_an_engine_with_room_for_one_starts_the_attempt_number_that_it_has_started_least() -> None:
    one = scheduler(*(engine(name, max_conversations=1) for name in "ab"))
    assert started(offer(one, 0, num=2)) == [(key(0, 0), "a"), (key(0, 1), "b")]
    offer(one, 1, num=2)
    assert started(one.ended(1.0, key(0, 0))) == [(key(1, 1), "a")]
    assert started(one.ended(1.0, key(0, 1))) == [(key(1, 0), "b")]


def test_a_rollout_that_fits_only_a_large_engine_does_not_keep_a_small_one_idle() -> None:
    one = scheduler(engine("large", kv_blocks=20), engine("small", kv_blocks=8))
    offer(one, 0, max_tokens=170)
    offer(one, 1, max_tokens=170)
    assert started(offer(one, 2)) == [(key(2, 0), "small")]
    assert one.waiting == (key(1, 0),)


def test_a_branch_shares_what_it_has_in_common_and_waits_when_the_rest_does_not_fit() -> None:
    one = scheduler(engine("a", kv_blocks=13))
    offer(one, 0)  # 8 blocks
    one.turn_finished(1.0, key(0, 0), run=1, num_tokens=15)
    one.tool_finished(2.0, key(0, 0), num_tokens=5)
    # At 50 tokens 5 blocks are common; 30 more are 3 blocks, for which there is room, and then no more.
    [branch] = one.branch_requested(2.0, key(0, 0, 1), parent=key(0, 0), max_tokens=30)
    assert branch == Run(key=key(0, 0, 1), engine="a", run=1, reason=RunReason.BRANCH, max_tokens=30)
    assert one.branch_requested(2.0, key(0, 0, 2), parent=key(0, 0), max_tokens=30) == []
    assert one.waiting == (key(0, 0, 2),)
    one.ended(2.5, key(0, 0, 2))  # another one is earlier in the order
    finish(one, key(0, 0), run=2, num_tokens=1, now_s=3.0)
    assert reserved_blocks(one, "a", of=13) == 8  # what the parent had in common with its branch stays
    finish(one, key(0, 0, 1), run=1, num_tokens=1, now_s=4.0)
    assert reserved_blocks(one, "a", of=13) == 0
    assert (one.ledger.branched, one.ledger.branches_queued, one.ledger.ended) == (2, 1, 3)


def test_branches_that_wait_start_in_the_memory_that_their_parent_leaves_the_longest_first() -> None:
    one = scheduler(engine("a", kv_blocks=16, max_conversations=2))
    offer(one, 0)
    offer(one, 1)
    offer(one, 2)  # waits, and comes after every branch
    one.turn_finished(1.0, key(0, 0), run=1, num_tokens=5)
    one.tool_finished(1.0, key(0, 0), num_tokens=5)
    one.branch_requested(1.0, key(0, 0, 1), parent=key(0, 0), max_tokens=40)
    one.turn_finished(2.0, key(0, 0), run=2, num_tokens=5)
    one.tool_finished(2.0, key(0, 0), num_tokens=5)
    for number in (2, 3):
        one.branch_requested(2.0, key(0, 0, number), parent=key(0, 0), max_tokens=30)
    one.turn_finished(3.0, key(1, 0), run=1, num_tokens=5)
    one.tool_finished(3.0, key(1, 0), num_tokens=5)
    one.branch_requested(3.0, key(1, 0, 1), parent=key(1, 0), max_tokens=40)
    assert one.waiting == (key(0, 0, 1), key(0, 0, 2), key(0, 0, 3), key(1, 0, 1), key(2, 0))
    after = [finish(one, ended, run=run, num_tokens=1, now_s=4.0) for ended, run in [(key(0, 0), 3), (key(0, 0, 2), 1)]]
    after += [finish(one, ended, run=run, num_tokens=1, now_s=5.0) for ended, run in [(key(1, 0), 2), (key(1, 0, 1), 1)]]
    # Each in the memory of a rollout that it shares with; one whose task has no more such branches leaves it to the others.
    runs = [[(action.key, action.reason) for action in actions if isinstance(action, Run)] for actions in after]
    assert runs == [
        [(key(0, 0, 2), RunReason.BRANCH)],
        [(key(0, 0, 3), RunReason.BRANCH)],
        [(key(1, 0, 1), RunReason.BRANCH)],
        [(key(0, 0, 1), RunReason.BRANCH)],
    ]
    [start] = [action for action in finish(one, key(0, 0, 3), run=1, num_tokens=1, now_s=6.0) if isinstance(action, Run)]
    assert (start.key, start.reason) == (key(2, 0), RunReason.START)


def test_a_dead_engines_rollouts_go_on_elsewhere_from_their_last_finished_turn() -> None:
    one = scheduler(engine("a", kv_blocks=200))
    offer(one, 0, num=2)
    one.turn_finished(1.0, key(0, 0), run=1, num_tokens=10)
    one.tool_finished(2.0, key(0, 0), num_tokens=5)
    one.engine_joined(2.0, engine("b", kv_blocks=200))
    first, second = one.engine_died(3.0, "a")
    assert first == Run(key=key(0, 0), engine="b", run=3, reason=RunReason.RESTART, max_tokens=35)
    assert second == Run(key=key(0, 1), engine="b", run=2, reason=RunReason.RESTART, max_tokens=50)
    late = one.turn_finished(4.0, key(0, 0), run=2, num_tokens=30)  # the dead engine's answer, after all
    assert late == []
    finish(one, key(0, 0), run=3, num_tokens=20, now_s=5.0)
    assert (one.ledger.lost_turns, one.ledger.stale_answers, one.ledger.sampled_tokens) == (2, 1, 30)


@pytest.mark.parametrize(("num_tokens", "moves"), [(15, True), (70, False)])
def test_a_rollout_moves_between_turns_to_an_engine_that_has_much_less_to_compute(num_tokens: int, moves: bool) -> None:
    one = scheduler(engine("a", kv_blocks=400), engine("b", kv_blocks=400))
    offer(one, 0, num=2, max_tokens=100)
    one.turn_finished(1.0, key(0, 0), run=1, num_tokens=num_tokens - 5)
    actions = one.tool_finished(2.0, key(0, 0), num_tokens=5)
    # Its context and that of the other, of 30 tokens: 45 of 75 are less than 0.7, 100 of 130 are not.
    left, name = 100 - num_tokens, "b" if moves else "a"
    reason = RunReason.MOVE if moves else RunReason.CONTINUE
    run = Run(key=key(0, 0), engine=name, run=2, reason=reason, max_tokens=left)
    assert actions == ([Release(key=key(0, 0), engine="a"), run] if moves else [run])
    assert (one.ledger.moved_tokens, one.ledger.recomputed_tokens) == (40 if moves else 0, 0)
    finish(one, key(0, 0), run=2, num_tokens=1, now_s=3.0)
    finish(one, key(0, 1), run=1, num_tokens=1, now_s=3.0)
    assert [reserved_blocks(one, each, of=400) for each in sorted({"a", name})] == [0] * (1 + moves)


def test_of_several_engines_one_is_asked_for_a_piece_of_a_turn_after_which_the_rollout_may_move() -> None:
    one = scheduler(*(engine(name, kv_blocks=1000) for name in "abc"))
    [first] = offer(one, 0, max_tokens=3000)
    assert first == Run(key=key(0, 0), engine="a", run=1, reason=RunReason.START, max_tokens=1024)
    assert started(offer(one, 1, max_tokens=3000) + offer(one, 2, max_tokens=3000)) == [(key(1, 0), "b"), (key(2, 0), "c")]
    [second] = one.piece_finished(1.0, key(0, 0), run=1, num_tokens=1024)
    assert second == Run(key=key(0, 0), engine="a", run=2, reason=RunReason.CONTINUE, max_tokens=1024)
    [third] = one.branch_requested(2.0, key(0, 0, 1), parent=key(0, 0), max_tokens=500)  # now "a" has two long contexts
    assert (third.engine, third.max_tokens) == ("a", 500)
    finish(one, key(1, 0), run=1, num_tokens=5, now_s=3.0)
    release, fourth = one.piece_finished(4.0, key(0, 0), run=2, num_tokens=1024)
    assert release == Release(key=key(0, 0), engine="a")
    assert fourth == Run(key=key(0, 0), engine="b", run=3, reason=RunReason.MOVE, max_tokens=952)
    assert one.piece_finished(5.0, key(0, 0), run=2, num_tokens=7) == []  # from where it was before
    [tools] = one.turn_finished(6.0, key(0, 0), run=3, num_tokens=52)
    assert tools == CallTools(key=key(0, 0))
    assert (one.ledger.turns, one.ledger.sampled_tokens, one.ledger.stale_answers) == (2, 2105, 1)


@pytest.mark.parametrize(("policy", "names"), [("scheduler", "a"), ("static", "ab")])
def test_a_turn_is_asked_for_at_once_of_a_single_engine_and_by_static(policy: str, names: str) -> None:
    one = scheduler(*(engine(name, kv_blocks=1000) for name in names), policy=policy)
    [run] = offer(one, 0, max_tokens=3000)
    assert isinstance(run, Run)
    assert run.max_tokens == 3000


def test_engines_that_keep_rollouts_sample_whole_turns_and_lose_none_to_a_lighter_one() -> None:
    one = scheduler(*(engine(name, kv_blocks=20_000, keeps_rollouts=True) for name in "ab"))
    first, second = offer(one, 0, num=2, max_tokens=3000)
    assert (first.max_tokens, first.engine, second.engine) == (3000, "a", "a")
    one.turn_finished(1.0, key(0, 0), run=1, num_tokens=10)
    [run] = one.tool_finished(2.0, key(0, 0), num_tokens=5)
    assert (run.reason, run.engine) == (RunReason.CONTINUE, "a")


def test_a_tool_may_outlive_the_engine_of_its_rollout() -> None:
    one = scheduler(engine("a"))
    offer(one, 0)
    one.turn_finished(1.0, key(0, 0), run=1, num_tokens=10)
    assert one.engine_died(2.0, "a") == []
    assert one.tool_finished(3.0, key(0, 0), num_tokens=5) == []
    [again] = one.engine_joined(4.0, engine("b"))
    assert again == Run(key=key(0, 0), engine="b", run=2, reason=RunReason.RESTART, max_tokens=35)
    assert one.ledger.recomputed_tokens == 40


def test_longest_first_starts_probes_of_every_group_and_then_the_group_that_turns_out_long() -> None:
    one = scheduler(engine("a", kv_blocks=100, max_conversations=2), order="longest_first")
    for task in range(3):
        offer(one, task, num=3)
    order = []
    ends = [(0, 0, 5), (0, 1, 5), (1, 0, 2), (1, 1, 2), (2, 0, 50), (2, 1, 50), (2, 2, 50)]
    for task, attempt, num_tokens in ends:
        order += [who for who, _ in started(finish(one, key(task, attempt), run=1, num_tokens=num_tokens, now_s=1.0))]
    # Both probes of group 0 began, for no other group was there. The two probes of groups 1 and 2 come next. When the first of
    # group 2 ends, 64 tokens of 5 rollouts were seen, 12.8 each: (12.8 + 50) / 2 are expected of group 2, (12.8 + 10) / 3 of
    # group 0 and (12.8 + 4) / 3 of group 1.
    assert order == [key(1, 0), key(1, 1), key(2, 0), key(2, 1), key(2, 2), key(0, 2), key(1, 2)]


def test_an_answer_longer_than_was_asked_for_is_refused() -> None:
    one = scheduler(engine("a"))
    offer(one, 0)
    with pytest.raises(StropError, match="has 50 tokens left, but sampled 51"):
        one.turn_finished(1.0, key(0, 0), run=1, num_tokens=51)


def test_static_deals_groups_evenly_and_waits_at_every_turn() -> None:
    one = scheduler(engine("a"), engine("b"), policy="static")
    assert {name for _, name in started(offer(one, 0, num=2))} == {"a"}
    assert {name for _, name in started(offer(one, 1, num=2))} == {"b"}
    assert one.turn_finished(1.0, key(0, 0), run=1, num_tokens=5) == []  # its neighbour is not done
    both = one.turn_finished(2.0, key(0, 1), run=1, num_tokens=5)
    assert both == [CallTools(key=key(0, 0)), CallTools(key=key(0, 1))]
    assert one.tool_finished(3.0, key(0, 0), num_tokens=1) == []
    assert len(started(one.tool_finished(4.0, key(0, 1), num_tokens=1))) == 2


def test_shares_are_of_the_memory_that_is_really_there() -> None:
    one = scheduler(engine("a", kv_blocks=16), oversubscription=2.0)
    offer(one, 0, num=4)  # 3 of prompt and 5 of each: 23 of 32 that may be reserved, 16 that are there
    assert one.usage["a"].kv_share.max == pytest.approx(23 / 16)


def test_an_engine_never_gets_a_conversation_that_is_longer_than_its_own_memory() -> None:
    one = scheduler(engine("large", kv_blocks=20), engine("small", kv_blocks=10), oversubscription=1.5)
    actions = offer(one, 0, num=2, max_tokens=100)  # 13 blocks each; small may reserve 15, and has 10
    assert {name for _, name in started(actions)} == {"large"}
