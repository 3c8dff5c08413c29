import math
import random
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import permutations

import pytest

from strop.config import validate
from strop.engine.protocol import Entropies
from strop.errors import ConfigError, UserError
from strop.rollout.branching import Branching, BranchingConfig, Claim, Claims, ProbedAt, Rule, Scale, branch_metrics, forks_at
from strop.types import (
    Completion,
    FinishReason,
    Group,
    RolloutKey,
    ScoredTrajectory,
    StopReason,
    Task,
    ToolCall,
    ToolOutcome,
    Trajectory,
    Turn,
    derive_seed,
)

VOCAB = 1000
ROOT = RolloutKey(task_index=3, attempt=1)


def completion(*entropies):
    return Completion(
        ids=(1,) * len(entropies),
        logprobs=(0.0,) * len(entropies),
        entropies=entropies,
        is_forced=(False,) * len(entropies),
        spans=((0, len(entropies)),),
        finish_reason=FinishReason.STOP,
        cached_tokens=0,
    )


def branching(**options):
    return Branching(config=BranchingConfig(initial_rollouts=8, **options), vocab_size=VOCAB)


def turn(num_sampled, num_observed):
    return Turn(
        completion=completion(*[0.5] * num_sampled),
        calls=(),
        observation_ids=(2,) * num_observed,
        completion_text="",
        observation_text="",
    )


START, AFTER = [0.5] * 30, [2.0] * 30  # entropies of two completions: they rise by 1.5 nats a token


@pytest.mark.parametrize(
    ("scale", "delta_h"),
    [
        (Scale.SUM, 20 * 1.5 / math.log(1000)),  # 4.343: of the first 20 tokens, whatever comes behind them
        (Scale.PAPER, 20 * 1.5 / 1000),
        (Scale.MEAN, 1.5 / math.log(1000)),
        (Scale.TOP10, 20 * 1.5 / math.log(1000)),  # of other entropies, which the engine is asked for
    ],
)
def test_the_change_of_entropy_is_that_of_the_first_k_tokens_on_the_scale_asked_for(scale, delta_h):
    verdict = branching(scale=scale, entropy_weight=0.1).verdict([START, AFTER], seed=0)
    assert verdict.delta_h == pytest.approx(delta_h)
    assert verdict.weighted == pytest.approx(0.1 * delta_h)
    assert verdict.probability == pytest.approx(0.5 + 0.1 * delta_h)


def test_the_scale_says_which_entropies_an_engine_reports():
    assert {scale: branching(scale=scale).config.entropies for scale in Scale} == {
        Scale.SUM: Entropies.FULL,
        Scale.PAPER: Entropies.FULL,
        Scale.MEAN: Entropies.FULL,
        Scale.TOP10: Entropies.TOP10,
    }


def test_a_short_completion_is_weighed_by_the_tokens_that_it_has():
    verdict = branching(entropy_weight=0.1).verdict([START, [2.0, 2.0]], seed=0)
    assert verdict.delta_h == pytest.approx((2 * 2.0 - 20 * 0.5) / math.log(1000))


def test_probabilities_end_at_0_and_1():
    assert branching(entropy_weight=5.0).verdict([START, AFTER], seed=0).probability == 1.0
    assert branching(entropy_weight=5.0).verdict([AFTER, START], seed=0).probability == 0.0


def test_the_released_probe_measures_the_completion_that_called_and_so_finds_nothing_at_the_first_call():
    released = branching(probe=ProbedAt.SEGMENT_BEFORE_CALL)
    assert released.verdict([START, AFTER], seed=0).delta_h == 0.0
    assert released.verdict([START, AFTER, START], seed=0).delta_h > 0


def test_the_coin_falls_as_often_as_the_probability_says_and_the_same_way_for_the_same_rollout():
    rule = branching(entropy_weight=0.1 * math.log(1000) / 30)  # P = 0.6
    wanted = [bool(rule.verdict([START, AFTER], seed=seed).paths) for seed in range(4000)]
    assert wanted == [bool(rule.verdict([START, AFTER], seed=seed).paths) for seed in range(4000)]
    assert sum(wanted) / 4000 == pytest.approx(0.6, abs=0.025)  # three standard deviations are 0.023


def test_each_path_has_a_coin_of_its_own_and_each_observation_too():
    rule = branching(beam_size=4, entropy_weight=0.0)
    seen = {rule.verdict([START] * number, seed=seed).paths for seed in range(200) for number in (2, 3)}
    assert len(seen) == 8  # every subset of three paths
    assert [rule.verdict([START] * 2, seed=s).paths for s in range(50)] != [
        rule.verdict([START] * 3, seed=s).paths for s in range(50)
    ]


def test_the_threshold_takes_all_paths_where_entropy_rose_and_none_where_it_did_not():
    rule = branching(rule=Rule.THRESHOLD, beam_size=3)
    assert rule.verdict([START, AFTER], seed=0).paths == (1, 2)
    assert rule.verdict([START, START], seed=0).paths == ()
    assert branching(rule=Rule.THRESHOLD, threshold=0.49).verdict([START, START], seed=0).paths == (1,)


def test_an_engine_without_entropies_is_named():
    with pytest.raises(UserError, match="the engine reports none"):
        branching().verdict([(), ()], seed=0)


def test_no_more_of_a_completion_is_awaited_than_decides():
    assert branching(probe_tokens=7).num_awaited == 7
    assert branching(probe_tokens=7, probe=ProbedAt.SEGMENT_BEFORE_CALL).num_awaited == 0  # what decides is known before
    for probe in ProbedAt:
        rule = branching(probe=probe)
        entropies = [START, AFTER, [float(number) for number in range(30)]]
        enough = [*entropies[:2], entropies[2][: rule.num_awaited]]
        assert rule.verdict(enough, seed=0) == rule.verdict(entropies, seed=0)


def test_a_threshold_for_the_coin_is_refused():
    with pytest.raises(ConfigError, match='rule is "coin", which has none'):
        validate(BranchingConfig, {"initial_rollouts": 2, "threshold": 0.5}, place="here")


def test_a_branchs_number_tells_its_descent_and_no_two_have_the_same():
    rule = branching(beam_size=3)
    keys = {ROOT: []}
    for at in (1, 2, 3):
        for parent, way in list(keys.items()):
            for path in (1, 2):
                claim = Claim(at=at, parent=parent, path=path)
                key = rule.key_of(claim)
                assert key not in keys
                keys[key] = [*way, claim]
    assert len(keys) == 27  # 3 ** 3 ways past three observations
    for key, way in keys.items():
        assert rule.descent(key) == way


def test_the_claims_that_are_met_do_not_depend_on_who_comes_first():
    other = RolloutKey(task_index=3, attempt=2)
    wanted = [Claim(at=at, parent=parent, path=1) for at in (1, 2) for parent in (ROOT, other)]
    for order in permutations(wanted):
        claims = Claims(3)
        for claim in order:
            claims.add(claim)
        assert claims.accepted == tuple(wanted[:3])


def test_a_claim_that_comes_before_displaces_the_last_and_one_behind_a_full_budget_is_refused():
    early, late = (Claim(at=at, parent=ROOT, path=1) for at in (1, 5))
    claims = Claims(1)
    assert claims.add(late) is None
    assert claims.add(early) == late
    assert claims.add(late) == late
    claims.drop(early)
    assert claims.add(late) is None
    assert Claims(0).add(early) == early


def test_the_first_rollout_measures_how_many_begin_at_the_prompt():
    rule = branching(monitoring_weight=0.5)

    def measured(*entropies):
        turns = [replace(turn(1, 1), completion=completion(*each)) for each in entropies]
        key = replace(ROOT, attempt=0)
        return Trajectory(key=key, task_id="t", prompt_ids=(7,), turns=tuple(turns), stop_reason=StopReason.ANSWERED)

    surer_at_the_start = measured(START, AFTER, AFTER)  # the gap is 20 * (0.5 - 2) / log 1000 = -4.342945
    assert rule.num_first([surer_at_the_start], 16) == 2  # 16 * 0.102363 = 1.638, rounded up
    assert rule.num_first([measured(AFTER, START, START)], 16) == 15  # 16 * 0.897637 = 14.362
    assert rule.num_first([measured(AFTER, AFTER, START)], 16) == 12  # half the gap: 16 * 0.747585... = 11.97
    assert rule.num_first([measured(START, START)], 16) == rule.num_first([measured(START)], 16) == 9  # 8, and one more
    assert [branching(monitoring_weight=1e6).num_first([measured(*each)], 16) for each in ([START, AFTER], [AFTER, START])] == [
        1,
        16,
    ]
    assert branching().num_first([surer_at_the_start], 16) == rule.num_first([], 16) == 8  # `initial_rollouts`
    assert rule.num_first([surer_at_the_start], 1) == branching().num_first([], 1) == 1


def test_each_branch_in_a_row_takes_its_share_off_the_probability_of_the_next():
    weight = 0.1 * math.log(1000) / 30  # βΔH is 0.1, so P is 0.6 without a penalty
    damped = branching(entropy_weight=weight, branch_penalty=0.05)
    probabilities = [damped.verdict([START, AFTER], seed=0, num_in_a_row=number).probability for number in (0, 1, 2, 20, 30)]
    assert probabilities == pytest.approx([0.6, 0.57, 0.54, 0.0, 0.0], abs=1e-6)
    rule = branching(entropy_weight=weight, branch_penalty=0.5, rule=Rule.THRESHOLD, threshold=0.25)
    rows = [[START] + [AFTER] * number for number in range(1, 6)]
    of_root = [rule.decision(ROOT, row, lambda key: 0).probability for row in rows]
    assert of_root == pytest.approx([0.6, 0.3, 0.0, 0.6, 0.3], abs=1e-6)  # at the third it does not branch, so the row ends


def test_a_branch_goes_on_with_the_row_of_its_parent():
    rule = branching(entropy_weight=0.0, base_probability=0.5, branch_penalty=0.05)
    parent_wants, own_wants = (
        next(seed for seed in range(99) if bool(rule.verdict([START] * 2, seed=seed).paths) is wants) for wants in (True, False)
    )
    branch = rule.key_of(Claim(at=1, parent=ROOT, path=1))
    seeds = {ROOT: parent_wants, branch: own_wants}
    assert rule.decision(branch, [START] * 3, seeds.__getitem__).probability == pytest.approx(0.475, abs=1e-6)
    seeds = {ROOT: own_wants, branch: parent_wants}
    assert rule.decision(branch, [START] * 3, seeds.__getitem__).probability == pytest.approx(0.5, abs=1e-6)


def test_without_a_penalty_a_decision_is_arpos():
    rows = [[START] + [AFTER, START] * number for number in (1, 2)]
    for seed in range(20):
        damped = branching(branch_penalty=0.3)
        assert [branching().decision(ROOT, row, lambda key, seed=seed: seed) for row in rows] == [
            branching().verdict(row, seed=seed) for row in rows
        ]
        assert all(
            set(damped.decision(ROOT, row, lambda key, seed=seed: seed).paths) <= set(branching().verdict(row, seed=seed).paths)
            for row in rows
        )


OTHER = RolloutKey(task_index=3, attempt=2)


def test_a_spread_budget_goes_round_the_rollouts_and_their_observations():
    rule = branching(spread_budget=True)
    wanted = [Claim(at=at, parent=parent, path=1) for parent, at in ((ROOT, 1), (ROOT, 2), (ROOT, 3), (OTHER, 3), (OTHER, 4))]
    for order in permutations(wanted):
        claims = Claims(4, rule)
        for claim in order:
            claims.add(claim)
        assert set(claims.accepted) == {wanted[0], wanted[1], wanted[3], wanted[4]}  # two each; without it ROOT has three
    branch = rule.key_of(Claim(at=1, parent=ROOT, path=1))
    of_one = [Claim(at=1, parent=ROOT, path=1), Claim(at=2, parent=ROOT, path=1), Claim(at=2, parent=branch, path=1)]
    claims = Claims(3, rule)
    for claim in [*of_one, later := Claim(at=3, parent=ROOT, path=1)]:
        refused = claims.add(claim)
    assert refused == of_one[2]  # the second one at its observation
    assert claims.accepted == (of_one[0], of_one[1], later)


@cache  # four timings ask
def _is_wanted(tree, attempt, branch, at, path):
    return bool(derive_seed(tree, attempt, branch, at, path) % 2)


def _grown(rule, budget, *, tree, timing, descent):
    """The accepted claims if lines come to their observations in the order that `timing` draws; what they want is `tree`'s."""
    claims, lines = Claims(budget, rule), {replace(ROOT, attempt=attempt): 1 for attempt in range(3)}
    while waiting := [key for key, at in lines.items() if at <= 4]:
        key = timing.choice(waiting)
        at = lines[key]
        lines[key] += 1
        for path in (1, 2):
            if _is_wanted(tree, key.attempt, key.branch, at, path):
                claim = Claim(at=at, parent=key, path=path)
                refused = claims.add(claim)
                if refused != claim:
                    lines[rule.key_of(claim)] = at + 1
                    if refused is not None:
                        del lines[rule.key_of(refused)]
        kept = set(claims.accepted)
        assert len(kept) <= budget
        assert all(kept.issuperset(descent(claim.parent)) for claim in kept)  # a branch's parent is kept
    return claims.accepted


@pytest.mark.parametrize("spreads", [False, True])
def test_the_tree_of_a_budget_does_not_depend_on_timing(spreads):
    rule = branching(spread_budget=spreads, beam_size=3)
    descent, largest = cache(rule.descent), []
    for tree in range(1000 if spreads else 100):
        budget = 2 + tree % 9
        expected = _grown(rule, budget, tree=tree, timing=random.Random(0), descent=descent)
        for number in range(1, 4):
            assert _grown(rule, budget, tree=tree, timing=random.Random(number), descent=descent) == expected
        per_root = Counter(claim.parent.attempt for claim in expected)
        largest.append(max(per_root.values()) - -(-budget // 3))
    assert (sum(largest) < 50) is spreads  # how far the best-off rollout is above its share


def _played(branch, *turns, forked_at=0):
    """A trajectory of these turns, each (tokens sampled, tokens observed, calls)."""
    call = ToolCall(name="python", arguments="{}", outcome=ToolOutcome.STDOUT, text="r", duration_s=0.0)
    made = [replace(turn(sampled, observed), calls=(call,) * calls) for sampled, observed, calls in turns]
    return ScoredTrajectory(
        trajectory=Trajectory(
            key=replace(ROOT, branch=branch),
            task_id="t",
            prompt_ids=(7,),
            turns=tuple(made),
            stop_reason=StopReason.ANSWERED,
            parent=ROOT if branch else None,
            forked_at=forked_at,
        ),
        reward=1.0,
        reward_parts={},
    )


def test_a_step_says_what_branching_saved_and_which_rollouts_say_the_same():
    root = _played(0, (3, 2, 2), (4, 1, 1), (5, 0, 0))
    late = _played(3, (3, 2, 2), (4, 1, 1), (6, 0, 0), forked_at=10)  # shares 2 turns: 3 calls, 7 sampled tokens
    early = _played(1, (3, 2, 2), (5, 0, 0), forked_at=5)  # shares 1 turn: 2 calls, 3 sampled tokens
    task = Task(id="t", question="?", answer="!", source="test")
    group = Group(task=task, task_index=3, trajectories=(root, late, early))
    found = branch_metrics([group], branching(), seed=0, num_rollouts=3)
    assert found["branching/tokens_shared"] == 15
    assert found["branching/calls_saved_fraction"] == pytest.approx(5 / 8)  # of 3 + 3 + 2
    assert found["branching/sampled_saved_fraction"] == pytest.approx(10 / 33)  # of 12 + 13 + 8
    assert found["branching/prefilled_saved_fraction"] == pytest.approx(5 / 8)  # of 3 + 3 + 2
    assert found["branching/duplicates"] == 0
    twins = Group(task=task, task_index=3, trajectories=(root, replace(root, reward=0.0), late))
    assert branch_metrics([twins], branching(), seed=0, num_rollouts=3)["branching/duplicates"] == 1


def test_a_rollout_decides_at_each_of_its_own_observations_that_it_went_on_after():
    turns = (turn(3, 2), turn(4, 1), turn(2, 0))
    whole = Trajectory(key=ROOT, task_id="t", prompt_ids=(1,), turns=turns, stop_reason=StopReason.ANSWERED)
    assert list(forks_at(whole)) == [1, 2]
    branch = Trajectory(
        key=RolloutKey(task_index=3, attempt=1, branch=1),
        task_id="t",
        prompt_ids=(1,),
        turns=turns,
        stop_reason=StopReason.ANSWERED,
        parent=ROOT,
        forked_at=5,  # behind the first observation, at which its parent decided
    )
    assert list(forks_at(branch)) == [2]
