"""Branching on a real model: what is sampled, shared and repeated, to the bit."""

from __future__ import annotations

import asyncio

import pytest
from test_tree import Watcher, judge, tree_of

from strop.engine.config import EngineConfig
from strop.engine.torch.engine import TorchEngine
from strop.rollout.branching import Branching, BranchingConfig
from strop.rollout.environment import Observation
from strop.rollout.player import Judge, Player, SamplingConfig, collect
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.stages.model import TinyModel, make_tiny_model
from strop.types import StopReason, Task

PROMPT, OBSERVATION = tuple(range(40, 60)), (7, 8, 9, 10)
TASKS = [(index, Task(id=f"t{index}", question="?", answer="!", source="test")) for index in range(2)]
STOPS = frozenset(range(0, 270, 6))
BRANCHING = {"initial_rollouts": 3, "base_probability": 0.7}


class ThreeTurns:
    """Observes two completions, and takes the third as the answer."""

    def __init__(self, num_turns=0):
        self.num_turns = num_turns

    async def start(self):
        return Observation(ids=PROMPT, text="", completion_text="", calls=(), stop_reason=None)

    async def fork(self, *, seed):
        return ThreeTurns(self.num_turns)

    async def step(self, completion, *, num_tokens_left):
        self.num_turns += 1
        is_over = self.num_turns == 3 or num_tokens_left < len(OBSERVATION)
        ids = () if is_over else OBSERVATION
        stop_reason = StopReason.ANSWERED if is_over else None
        return Observation(ids=ids, text="", completion_text="", calls=(), stop_reason=stop_reason)

    async def close(self):
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    sizes = TinyModel(vocab_size=320, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=2)
    make_tiny_model(sizes, ["Count to 3."] * 10, directory, seed=0)
    return directory


@pytest.fixture(scope="module")
def branched(model):
    """Groups of a run that branches, what the scheduler counted, and who watched."""
    watcher = Watcher()
    return *play_groups(model, watcher=watcher, **BRANCHING), watcher


def play_groups(model, *, slots=16, finished=None, watcher=None, **options):
    """Groups in order, and what the scheduler counted; no options: without branching."""

    async def all_groups():
        engine = TorchEngine.from_directory(model, EngineConfig(slots=slots, max_length=128, device="cpu"))
        fleet = EnginePool([engine])
        player = Player(
            engine=fleet,
            environments=lambda task, *, seed: ThreeTurns(),
            judge=Judge(reward=judge, weights={"accuracy": 1.0}),
            sampling=SamplingConfig(max_tokens=96),
            stop_ids=STOPS,
            branching=Branching(config=BranchingConfig(**options), vocab_size=320) if options else None,
        )
        try:
            playing = collect(TASKS, player, num_rollouts=6, seed=3, observer=watcher or Watcher(), finished=finished or {})
            groups = sorted([group async for group in playing], key=lambda group: group.task_index)
        finally:
            await fleet.close()
        return groups, fleet.last_batch.ledger

    return asyncio.run(asyncio.wait_for(all_groups(), 100))


def figures(groups):
    """Everything that may not differ: ids, log-probs, entropies, rewards, the tree; not how much was found in a cache."""
    return [
        (scored.reward, tree_of(group)[scored.trajectory.key], turn.completion.logprobs, turn.completion.entropies)
        for group in groups
        for scored in group.trajectories
        for turn in scored.trajectory.turns
    ]


def test_without_a_branch_every_bit_is_as_without_branching(model):
    plain, _ = play_groups(model)
    assert figures(play_groups(model, initial_rollouts=6)[0]) == figures(plain)
    never, _ = play_groups(model, initial_rollouts=3, base_probability=0.0, entropy_weight=0.0)
    assert figures(never) == figures(plain)


def test_branches_share_their_parents_memory_and_two_runs_are_equal_to_the_bit(model, branched):
    groups, ledger, _ = branched
    again, _ = play_groups(model, **BRANCHING)
    assert figures(groups) == figures(again)
    assert ledger.branches_queued == 0
    found = [scored.trajectory for group in groups for scored in group.trajectories if scored.trajectory.parent is not None]
    assert len(found) >= 4
    for branch in found:
        own = next(turn for turn, before in zip(branch.turns, _before(branch), strict=True) if before == branch.forked_at)
        assert own.completion.cached_tokens == len(PROMPT) + branch.forked_at - 1  # all but the last id, which is fed


def test_a_branch_samples_what_it_would_have_sampled_from_a_context_of_its_own(model, branched):
    roomy, _, _ = branched
    narrow, ledger = play_groups(model, slots=3, **BRANCHING)
    assert ledger.branches_queued > 0
    assert [tree_of(group) for group in narrow] == [tree_of(group) for group in roomy]
    for one, other in zip(figures(roomy), figures(narrow), strict=True):
        assert one[2] == pytest.approx(other[2], abs=1e-4)


def test_a_resumed_batch_is_equal_to_the_bit(model, branched):
    groups, _, whole = branched
    kept = {scored.trajectory.key for group in groups for scored in group.trajectories}
    finished = {key: scored for key, scored in list(whole.ended.items())[::2] if key in kept}
    watcher = Watcher()
    resumed, _ = play_groups(model, watcher=watcher, finished=finished, **BRANCHING)
    assert figures(resumed) == figures(groups)
    assert not set(watcher.begun) & set(finished)


def _before(trajectory):
    """Response tokens before each turn."""
    num, before = 0, []
    for turn in trajectory.turns:
        before.append(num)
        num += len(turn.completion.ids) + len(turn.observation_ids)
    return before
