import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from faulty_engine import Fault, FaultyEngine
from strop.engine.scripted import Reply
from strop.errors import ToolBroken, UserError
from strop.rollout.branch_tree import Tree
from strop.rollout.branching import Branching, BranchingConfig
from strop.rollout.environment import Observation
from strop.rollout.player import Judge, Opened, Past, Player, SamplingConfig, Spent, collect
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.types import RolloutKey, StopReason, Task

PROMPT, OBSERVATION, CALL, STOP = (1, 2, 3), (5, 6), 8, 9
TASK = (0, Task(id="t", question="?", answer="!", source="test"))


class World:
    """A completion that ends with CALL is observed, any other is an answer. Counts what is open, stepped and forked."""

    def __init__(self, *, num_broken_forks=0, breaks=lambda world: False):
        self.num_open = self.num_steps = self.num_forks = 0
        self.num_broken_forks, self.breaks = num_broken_forks, breaks

    def __call__(self, task, *, seed):
        return Conversation(self, steps=())


class Conversation:
    def __init__(self, world, *, steps):
        self.world, self.steps = world, steps
        world.num_open += 1

    async def start(self):
        return Observation(ids=PROMPT, text="", completion_text="", calls=(), stop_reason=None)

    async def fork(self, *, seed):
        await asyncio.sleep(0.001)
        self.world.num_forks += 1
        if self.world.num_forks <= self.world.num_broken_forks:
            raise ToolBroken("the session is lost")
        return Conversation(self.world, steps=self.steps)

    async def step(self, completion, *, num_tokens_left):
        self.world.num_steps += 1
        if self.world.breaks(self.world):
            raise ToolBroken("the tool is out of order")
        self.steps += (completion.ids,)
        if completion.ids[-1] != CALL:
            return Observation(ids=(), text="", completion_text="", calls=(), stop_reason=StopReason.ANSWERED)
        # What is observed tells how many calls went before: a fork that lost its state would show.
        ids = (*OBSERVATION, 10 + len(self.steps))
        return Observation(ids=ids, text="", completion_text="", calls=(), stop_reason=None)

    async def close(self):
        self.world.num_open -= 1


class Unforkable(Conversation):
    fork = None


def says(request):
    """A first turn is sure of itself; two calls on average, and then an answer. A pure function of the request's seed."""
    draw = random.Random(request.seed)
    num_turns = request.ids.count(OBSERVATION[0])
    word = 100 + draw.randrange(50)
    end = CALL if num_turns == 0 or (num_turns < 4 and draw.random() < 0.6) else STOP
    entropy = 0.1 if num_turns == 0 else draw.uniform(0, 3)
    return Reply(ids=(word, word, end), logprobs=(-1.0,) * 3, entropies=(entropy,) * 3)


class Jittery(FaultyEngine):
    """Takes any time it likes, and does not promise to repeat itself unless told to."""

    is_exact = True

    def __init__(self, policy, *, jitter, **options):
        super().__init__(policy, **options)
        self.jitter = random.Random(jitter)

    @property
    def capabilities(self):
        return replace(super().capabilities, is_deterministic=self.is_exact)

    async def complete(self, request):
        await asyncio.sleep(self.jitter.random() * 0.01)
        return await super().complete(request)


class Watcher:
    def __init__(self):
        self.begun, self.ended, self.spent, self.identical = [], {}, {}, []

    def started(self, key, *, seed):
        self.begun.append(key)

    def finished(self, scored):
        self.ended[scored.trajectory.key] = scored

    def voided(self, key, *, reason, num_tokens):
        self.void = (key, reason)

    def displaced(self, key, spent):
        self.spent[key] = spent

    def replaced(self, key):
        self.identical.append(key)


async def judge(task, trajectory):
    return {"accuracy": float(sum(trajectory.ids) % 2)}


def play_group(*, engine=None, world=None, num_rollouts=8, watcher=None, finished=None, fleet=None, seed=4, **options):
    """The group, with branching as `options` say; none of them: without branching."""
    options = {"initial_rollouts": 4, "entropy_weight": 0.3} | options if options.get("initial_rollouts") != 0 else None
    player = Player(
        engine=fleet or engine or FaultyEngine(says),
        environments=world or World(),
        judge=Judge(reward=judge, weights={"accuracy": 1.0}),
        sampling=SamplingConfig(max_tokens=60),
        stop_ids=frozenset({STOP, CALL}),
        branching=None if options is None else Branching(config=BranchingConfig(**options), vocab_size=200),
    )

    async def all_groups():
        playing = collect(
            [TASK], player, num_rollouts=num_rollouts, seed=seed, observer=watcher or Watcher(), finished=finished or {}
        )
        return [group async for group in playing]

    (group,) = asyncio.run(asyncio.wait_for(all_groups(), 30))
    return group


def tree_of(group):
    return {
        each.trajectory.key: (each.trajectory.parent, each.trajectory.forked_at, each.trajectory.ids)
        for each in group.trajectories
    }


def place(key):
    """As it stands in the id of a request."""
    return [str(key.attempt), str(key.branch)]


def branches(group):
    return [each.trajectory for each in group.trajectories if each.trajectory.parent is not None]


def test_a_branch_begins_at_the_end_of_an_observation_and_the_probe_stays_with_its_parent():
    engine, world = FaultyEngine(says), World()
    group = play_group(engine=engine, world=world)
    by_key = {each.trajectory.key: each.trajectory for each in group.trajectories}
    assert len(branches(group)) == 4  # M - N
    for branch in branches(group):
        parent = by_key[branch.parent]
        num_shared = len(PROMPT) + branch.forked_at
        assert branch.ids[:num_shared] == parent.ids[:num_shared]
        assert branch.ids[num_shared - 3 : num_shared - 1] == list(OBSERVATION)
        assert branch.ids[num_shared : num_shared + 3] != parent.ids[num_shared : num_shared + 3]  # seeds are their own
        first = next(each for each in engine.requests if each.id.split("/")[2:4] == place(branch.key))
        assert first.ids == tuple(branch.ids[:num_shared])
        assert (first.at, first.extends.split("/")[2:4]) == (num_shared, place(parent.key))  # shares the parent's KV
        observed = [turn.observation_ids[-1] for turn in branch.turns[:-1]]
        assert observed == [11 + number for number in range(len(observed))]  # the state of the environment came along
    assert world.num_open == 0


def test_where_too_few_branch_the_rest_begin_at_the_prompt_all_at_once():
    engine = FaultyEngine(says, latency_s=0.01)
    group = play_group(engine=engine, base_probability=0.0, entropy_weight=0.0)
    assert not branches(group)
    assert [each.trajectory.key.attempt for each in group.trajectories] == list(range(8))
    first_of = [number for number, request in enumerate(engine.requests) if request.ids == PROMPT]
    assert first_of[-4:] == list(range(first_of[4], first_of[4] + 4))
    assert len({tuple(each.trajectory.ids) for each in group.trajectories}) == 8  # nothing is there twice


@pytest.mark.parametrize("options", [{"base_probability": 0.0, "entropy_weight": 0.0}, {"initial_rollouts": 8}])
def test_without_a_branch_everything_is_as_without_branching(options):
    assert play_group(**options) == play_group(initial_rollouts=0)


AEPO = {"monitoring_weight": 0.5, "branch_penalty": 0.05}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"beam_size": 3},
        {"base_probability": 1.0},
        {"num_rollouts": 6},
        {"base_probability": 1.0, "spread_budget": True},
        {**AEPO},
        {**AEPO, "beam_size": 3, "spread_budget": True, "replace_identical": True},
    ],
)
def test_the_tree_is_the_same_whoever_is_faster(options):
    steady = tree_of(play_group(**options))
    for jitter in range(4):
        assert tree_of(play_group(engine=Jittery(says, jitter=jitter), **options)) == steady


def test_caps_hold_for_a_decision_and_for_a_task():
    group = play_group(base_probability=1.0, num_rollouts=7)
    assert (len(group.trajectories), len(branches(group))) == (7, 3)
    places = [(branch.parent, branch.forked_at) for branch in branches(group)]
    assert len(set(places)) == len(places)  # beam 2: one branch at an observation


def test_with_a_spread_budget_every_rollout_has_its_share_of_branches():
    roots = [branch.key.attempt for branch in branches(play_group(base_probability=1.0, spread_budget=True))]
    assert sorted(roots) == [0, 1, 2, 3]
    early = [branch.key.attempt for branch in branches(play_group(base_probability=1.0, num_rollouts=6))]
    assert sorted(early) == [0, 1]


def calls_alike(request):
    """As `calls_three_times`, but what follows the first turn is the same for all."""
    reply = calls_three_times(request)
    return reply if OBSERVATION[0] not in request.ids else replace(reply, ids=(100, *reply.ids[1:]))


def test_a_branch_that_says_what_its_parent_says_is_replaced_from_the_prompt_once():
    options = {"initial_rollouts": 2, "num_rollouts": 4, "base_probability": 1.0}
    watcher, world = Watcher(), World()
    group = play_group(engine=FaultyEngine(calls_alike), watcher=watcher, world=world, replace_identical=True, **options)
    assert sorted((key.attempt, key.branch) for key in watcher.identical) == [(0, 1), (1, 1)]
    assert [each.trajectory.key.attempt for each in group.trajectories] == [0, 1, 2, 3]
    assert not branches(group)
    assert world.num_open == 0
    again = play_group(engine=FaultyEngine(calls_alike), finished=watcher.ended, replace_identical=True, **options)
    assert tree_of(again) == tree_of(group)
    kept = play_group(engine=FaultyEngine(calls_alike), **options)
    assert len(branches(kept)) == 2


def test_a_rollout_that_others_branched_off_is_not_replaced():
    options = {"initial_rollouts": 1, "num_rollouts": 5, "base_probability": 1.0, "replace_identical": True}

    def all_but_one_alike(request):  # the first branch says what its parent says; its own branch does not
        reply = calls_alike(request)
        return replace(reply, ids=(99, *reply.ids[1:])) if request.id.split("/")[3] == "3" else reply

    watcher = Watcher()
    group = play_group(engine=FaultyEngine(all_but_one_alike), watcher=watcher, **options)
    assert sorted((branch.key.branch, branch.parent.branch) for branch in branches(group)) == [(1, 0), (3, 1)]
    assert len(group.trajectories) == 5
    assert not branches(play_group(engine=FaultyEngine(calls_alike), **options))  # with nothing to tell them apart


def test_the_first_rollout_is_played_ahead_and_says_how_many_begin_at_the_prompt():
    engine, world, watcher = FaultyEngine(calls_three_times), World(), Watcher()
    group = play_group(engine=engine, world=world, watcher=watcher, base_probability=1.0, **AEPO)
    # Entropies are 0 in the first turn, then 3 tokens of 1, 2 and 3 nats: 8 σ(-0.5 * 6 / log 200) = 8 * 0.361 = 2.89
    assert sorted({each.trajectory.key.attempt for each in group.trajectories}) == [0, 1, 2]
    assert len(group.trajectories) == 8
    first = [request.id.split("/")[2:4] for request in engine.requests[:4]]
    assert first == [["0", "0"]] * 4
    assert len(branches(group)) == 5
    assert {branch.key.attempt for branch in branches(group)} >= {0}  # it branches as the others do
    assert world.num_open == 0
    assert 8 <= len(watcher.ended) <= 8 + len(watcher.spent)  # those that ended before they were displaced


def test_a_first_rollout_that_fails_leaves_the_number_to_the_recipe():
    world = World(breaks=lambda world: world.num_steps <= 3)
    group = play_group(world=world, base_probability=0.0, entropy_weight=0.0, **AEPO)
    assert (group.num_void, len(group.trajectories), world.num_open) == (1, 8, 0)
    assert [each.trajectory.key.attempt for each in group.trajectories] == list(range(1, 9))


@pytest.mark.parametrize("options", [{}, {**AEPO, "spread_budget": True}])
@pytest.mark.parametrize("is_exact", [True, False])
def test_what_finished_before_an_interruption_stays_and_the_tree_is_the_same(is_exact, options):
    whole = Watcher()
    expected = tree_of(play_group(watcher=whole, **options))
    scored = {key: each for key, each in whole.ended.items() if key in expected}
    for number in range(6):
        draw = random.Random(number)
        finished = {key: each for key, each in scored.items() if draw.random() < 0.5}
        watcher, world, engine = Watcher(), World(), Jittery(says, jitter=number)
        engine.is_exact = is_exact
        group = play_group(finished=finished, watcher=watcher, world=world, engine=engine, **options)
        assert tree_of(group) == expected
        begun = {tuple(request.id.split("/")[2:4]) for request in engine.requests}
        again = {key for key in finished if tuple(place(key)) in begun}
        assert not again or is_exact  # those are sampled again to the bit, so that their branches find what they would have
        assert all(request.extends or request.ids == PROMPT for request in engine.requests) or not is_exact
        assert not set(watcher.begun) & set(finished)
        assert world.num_open == 0
    everything = Watcher()
    assert tree_of(play_group(finished=scored, watcher=everything, **options)) == expected
    assert not everything.begun


def test_a_branch_whose_session_cannot_be_forked_steps_through_what_it_shares():
    expected = tree_of(play_group())
    world = World(num_broken_forks=2)
    assert tree_of(play_group(world=world)) == expected
    assert world.num_open == 0


def test_a_rollout_that_our_fault_spoils_begins_anew_with_its_branches():
    expected = tree_of(play_group())
    for number in range(1, 20, 3):
        world = World(breaks=lambda world, number=number: world.num_steps == number)
        assert tree_of(play_group(world=world)) == expected
        assert world.num_open == 0


def test_a_branch_that_finds_no_room_beside_its_parent_is_counted_and_waits_its_turn():
    fleet = EnginePool([FaultyEngine(says, max_running=4)])
    assert tree_of(play_group(fleet=fleet)) == tree_of(play_group())
    ledger = fleet.last_batch.ledger
    assert ledger.branches_queued > 0
    assert ledger.branches_queued + ledger.branched >= 4


class Paced(FaultyEngine):
    """Answers each request after the seconds that `waits` gives for its (attempt, branch, turn); at once without them."""

    def __init__(self, policy, *, waits, **options):
        super().__init__(policy, **options)
        self.waits = waits

    async def complete(self, request):
        await asyncio.sleep(self.waits.get(tuple(map(int, request.id.split("/")[2:])), 0))
        return await super().complete(request)


def calls_three_times(request):
    """Four turns of three tokens each, the last an answer; every observation is worth a branch."""
    num_turns = request.ids.count(OBSERVATION[0])
    end = CALL if num_turns < 3 else STOP
    return Reply(ids=(100 + request.seed % 50, 150, end), logprobs=(-1.0,) * 3, entropies=(float(num_turns),) * 3)


@pytest.mark.parametrize(
    ("never", "spent"),
    [
        ((1, 1, 2), Spent(generated_tokens=3, prefilled_tokens=1 + 4, is_sampling=True)),  # 9 ids - 8; 15 ids - 11
        ((1, 1, 1), Spent(generated_tokens=0, prefilled_tokens=1, is_sampling=True)),
        (None, Spent(generated_tokens=9, prefilled_tokens=1 + 3 + 3, is_sampling=False)),  # it had finished
    ],
)
def test_what_a_displaced_branch_had_spent_is_told(never, spent):
    """Attempt 1 is at its observation first, and branches. Attempt 0 stands before it, comes later, and takes the budget."""
    engine, watcher, world = Paced(calls_three_times, waits={(0, 0, 1): 0.2, never: 25}), Watcher(), World()
    group = play_group(engine=engine, watcher=watcher, world=world, num_rollouts=3, initial_rollouts=2, base_probability=1.0)
    assert [(each.key.attempt, each.forked_at) for each in branches(group)] == [(0, 6)]  # 3 sampled, 3 observed
    (key,) = watcher.spent
    assert (key.attempt, key.branch) == (1, 1)
    assert watcher.spent[key] == spent
    assert (key in watcher.ended) is (never is None)
    assert world.num_open == 0


def test_a_parent_waits_for_no_branch_that_lost_their_engine():
    """Both begin again where one conversation fits: the branch has room only when its parent has left."""
    faults = {1: Fault.LOSE}  # the first request of the branch, while its parent still samples its second turn

    async def open_another(index, name):
        return FaultyEngine(calls_three_times, max_running=1)

    class Probed(FaultyEngine):
        async def complete(self, request):
            if request.probe is not None:
                asyncio.get_running_loop().call_soon(request.probe.tell, (1.0,))
                await asyncio.sleep(0.01)
            return await super().complete(request)

    first = Probed(calls_three_times, max_running=2, faults=faults)
    options = {"num_rollouts": 2, "initial_rollouts": 1, "base_probability": 1.0}
    group = play_group(fleet=EnginePool([first], open_another=open_another), **options)
    assert tree_of(group) == tree_of(play_group(engine=FaultyEngine(calls_three_times), **options))
    assert [len(request.ids) for request in first.requests[:2]] == [3, 9]  # the prompt; the fork


def test_a_branch_that_is_given_up_decides_nothing_more():
    async def scenario():
        watcher = Watcher()
        tree = Tree(TASK[1], SimpleNamespace(observer=watcher), branching=None, budget=1)
        key = RolloutKey(task_index=0, attempt=0, branch=1)
        forking = await tree._make_forking(key)
        tree._end_branch(key)
        forking.decide(None, None, (), None)  # as a callback of the engine that was under way

    asyncio.run(scenario())


def test_an_environment_that_cannot_be_forked_is_named():
    with pytest.raises(UserError, match="Unforkable cannot be forked, but the stage branches"):
        play_group(world=lambda task, *, seed: Unforkable(World(), steps=()))


def test_an_environment_that_comes_after_its_branch_was_cancelled_is_closed():
    class Environment:
        is_closed = False

        async def close(self):
            self.is_closed = True

    async def scenario():
        forked, late = Opened(past=Past(prompt_ids=PROMPT)), Environment()

        async def wait():
            await forked.environment

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        await forked.come(late)
        forked.fail(ToolBroken("too late, too"))
        return late.is_closed

    assert asyncio.run(scenario())
