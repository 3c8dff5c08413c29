import math
from dataclasses import replace
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
)

VOCAB = 1000
ROOT = RolloutKey(task_index=3, attempt=1)


def completion(*entropies):
    return Completion(
        ids=(1,) * len(entropies),
        logprobs=(0.0,) * len(entropies),
        entropies=entropies,
        is_forced=(False,) * len(entropies),
        policy_version=0,
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
    assert branching(probe_tokens=7, probe=ProbedAt.SEGMENT_BEFORE_CALL).num_awaited == 1  # what decides is known before
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
    found = branch_metrics([group], branching(), seed=0)
    assert found["branching/tokens_shared"] == 15
    assert found["branching/calls_saved_fraction"] == pytest.approx(5 / 8)  # of 3 + 3 + 2
    assert found["branching/sampled_saved_fraction"] == pytest.approx(10 / 33)  # of 12 + 13 + 8
    assert found["branching/prefilled_saved_fraction"] == pytest.approx(5 / 8)  # of 3 + 3 + 2
    assert found["branching/duplicates"] == 0
    twins = Group(task=task, task_index=3, trajectories=(root, replace(root, reward=0.0), late))
    assert branch_metrics([twins], branching(), seed=0)["branching/duplicates"] == 1


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
