import asyncio
from collections import Counter

import pytest

from faulty_engine import Fault, FaultyEngine
from strop.errors import DeadlineExceeded, EngineLost, MachineError, RequestTooLong, ToolBroken
from strop.evaluation.metrics import rollout_metrics
from strop.rollout.environment import Observation
from strop.rollout.player import Judge, Player, SamplingConfig, collect
from strop.rollout.scheduler.engine_pool import EnginePool
from strop.types import RolloutKey, StopReason, Task, derive_seed

PROMPT, ANSWER = (1, 2, 3), (7, 9)
STOP = 9


def task(index):
    return index, Task(id=f"task-{index}", question="?", answer="!", source="test")


class World:
    """Environments that ask for one completion and end; `before(task, try)` may wait or fail, of the n-th try of a task."""

    def __init__(self, before=None):
        self.before = before
        self.num_tries = Counter()
        self.num_open = 0

    def __call__(self, task, *, seed):
        return OneTurn(self, task)


class OneTurn:
    def __init__(self, world, task):
        self.world, self.task = world, task

    async def start(self):
        self.world.num_open += 1
        return Observation(ids=PROMPT, text="", completion_text="", calls=(), stop_reason=None)

    async def step(self, completion, *, num_tokens_left):
        self.world.num_tries[self.task.id] += 1
        if self.world.before is not None:
            await self.world.before(self.task, self.world.num_tries[self.task.id])
        return Observation(ids=(), text="", completion_text="said", calls=(), stop_reason=StopReason.ANSWERED)

    async def close(self):
        self.world.num_open -= 1


class Watcher:
    def __init__(self):
        self.events = []
        self.seeds = {}

    def started(self, key, *, seed):
        self.events.append(("started", key))
        self.seeds[key] = seed

    def finished(self, scored):
        self.events.append(("finished", scored.trajectory.key))

    def voided(self, key, *, reason, num_tokens):
        self.events.append(("voided", key))
        self.reason = reason

    def of(self, event):
        return [key for name, key in self.events if name == event]


async def always_right(task, trajectory):
    return {"accuracy": 1.0}


def make_player(world, engine=None, reward=always_right, **options):
    engine = engine or FaultyEngine(lambda request: ANSWER)
    judge = Judge(reward=reward, weights={"accuracy": 2.0})
    sampling = SamplingConfig(max_tokens=8)
    return Player(engine=engine, environments=world, judge=judge, sampling=sampling, stop_ids=frozenset({STOP}), **options)


def play_all(player, *, tasks=None, num_rollouts=2, watcher=None, finished=None, seed=5):
    async def all_groups():
        playing = collect(
            tasks or [task(0)],
            player,
            num_rollouts=num_rollouts,
            seed=seed,
            observer=watcher or Watcher(),
            finished=finished or {},
        )
        return [group async for group in playing]

    return asyncio.run(all_groups())


def test_a_group_is_yielded_when_its_own_last_rollout_is_scored_whatever_the_others_do():
    async def scenario():
        gate = asyncio.Event()

        async def slow_first(task, attempt):
            if task.id == "task-0":
                await gate.wait()

        playing = collect(
            [task(0), task(1), task(2)],
            make_player(World(slow_first)),
            num_rollouts=2,
            seed=0,
            observer=Watcher(),
            finished={},
        )
        early = [(await anext(playing)).task_index, (await anext(playing)).task_index]
        gate.set()
        late = [group.task_index async for group in playing]
        return sorted(early), late

    assert asyncio.run(asyncio.wait_for(scenario(), 5)) == ([1, 2], [0])


def test_a_group_holds_its_rollouts_in_canonical_order_with_weighted_rewards():
    (group,) = play_all(make_player(World()), num_rollouts=3)
    assert [scored.trajectory.key.attempt for scored in group.trajectories] == [0, 1, 2]
    assert [scored.reward for scored in group.trajectories] == [2.0] * 3  # weight 2 of accuracy 1
    assert {tuple(scored.trajectory.ids) for scored in group.trajectories} == {PROMPT + ANSWER}
    assert group.num_void == 0


def test_a_fault_of_ours_is_played_again_from_turn_0_with_the_same_seed():
    async def breaks_once(task, attempt):
        if attempt == 1:
            raise ToolBroken("the tool is out of order")

    watcher, world, engine = Watcher(), World(breaks_once), FaultyEngine(lambda request: ANSWER)
    (group,) = play_all(make_player(world, engine), num_rollouts=1, watcher=watcher)
    key = RolloutKey(task_index=0, attempt=0)
    assert watcher.events == [("started", key), ("started", key), ("finished", key)]
    first, second = engine.requests
    assert first == second
    assert (group.num_void, len(group.trajectories)) == (0, 1)
    assert world.num_open == 0


def test_a_tool_that_stays_broken_voids_the_rollout_and_another_attempt_takes_its_place():
    world, watcher = World(), Watcher()

    class Broken(OneTurn):
        async def step(self, completion, *, num_tokens_left):
            raise ToolBroken("the tool is out of order")

    def first_is_broken(task, *, seed):
        return (Broken if seed == derive_seed(5, 0, 0, 0) else OneTurn)(world, task)

    (group,) = play_all(make_player(first_is_broken), num_rollouts=2, watcher=watcher, seed=5)
    assert [scored.trajectory.key.attempt for scored in group.trajectories] == [1, 2]
    assert group.rewards == [2.0, 2.0]  # the void one is counted, and in no mean
    assert group.num_void == 1
    assert watcher.of("started").count(RolloutKey(task_index=0, attempt=0)) == 3  # MAX_TRIES
    assert watcher.of("voided") == [RolloutKey(task_index=0, attempt=0)]
    assert watcher.reason == "the tool is out of order"
    assert rollout_metrics([group])["rollout/accuracy"] == 1.0
    assert rollout_metrics([group])["rollout/void_fraction"] == 1 / 3


def test_a_group_whose_every_rollout_is_void_is_empty_and_stops_being_refilled():
    async def breaks(task, attempt):
        raise MachineError("no sandbox")

    watcher = Watcher()
    (group,) = play_all(make_player(World(breaks)), num_rollouts=2, watcher=watcher)
    assert group.trajectories == ()
    assert group.num_void == 4  # 2 asked for, and 2 more in their place
    assert Counter(watcher.of("started")) == {RolloutKey(task_index=0, attempt=attempt): 3 for attempt in range(4)}


def test_a_judge_that_is_lost_voids_the_rollout_instead_of_scoring_it_0():
    async def lost(task, trajectory):
        if trajectory.key.attempt == 1:
            raise MachineError("the verifier died")
        return {"accuracy": 1.0}

    watcher = Watcher()
    (group,) = play_all(make_player(World(), reward=lost), num_rollouts=2, watcher=watcher)
    assert group.rewards == [2.0, 2.0]
    assert [scored.trajectory.key.attempt for scored in group.trajectories] == [0, 2]
    assert watcher.of("voided") == [RolloutKey(task_index=0, attempt=1)]


def test_a_void_rollout_names_who_waited_too_long_and_for_what():
    async def silent(task, attempt):
        raise DeadlineExceeded(f"tool 'search' gave no answer to call 0 of turn 0 of {task.id} within 0.1 s.")

    watcher = Watcher()
    play_all(make_player(World(silent)), num_rollouts=1, watcher=watcher)
    assert watcher.reason == "tool 'search' gave no answer to call 0 of turn 0 of task-0 within 0.1 s."


def test_a_lost_engine_ends_the_batch_but_not_what_had_been_finished():
    watcher, world = Watcher(), World()
    player = make_player(world, FaultyEngine(lambda request: ANSWER, faults={2: Fault.LOSE}, max_running=1))
    with pytest.raises(EngineLost, match="scripted to lose"):
        play_all(player, num_rollouts=4, watcher=watcher)
    assert world.num_open == 0
    assert watcher.of("voided") == []


def test_finished_rollouts_of_an_interrupted_batch_are_not_played_again():
    (before,) = play_all(make_player(World()), num_rollouts=3)
    kept = {scored.trajectory.key: scored for scored in before.trajectories[:2]}
    watcher, engine = Watcher(), FaultyEngine(lambda request: ANSWER)
    (after,) = play_all(make_player(World(), engine), num_rollouts=3, watcher=watcher, finished=kept)
    assert after == before
    assert watcher.of("started") == [RolloutKey(task_index=0, attempt=2)]
    assert len(engine.requests) == 1


def test_the_seed_of_a_rollout_depends_on_batch_and_key_alone():
    def seeds(tasks, num_rollouts, seed=5):
        watcher = Watcher()
        play_all(make_player(World()), tasks=tasks, num_rollouts=num_rollouts, watcher=watcher, seed=seed)
        return watcher.seeds

    few, many = seeds([task(1)], 2), seeds([task(2), task(1), task(0)], 4)
    assert few == {key: many[key] for key in few}
    assert len(set(many.values())) == 12
    assert not set(seeds([task(1)], 2, seed=6).values()) & set(few.values())


@pytest.mark.parametrize("how", ["the consumer is cancelled", "the consumer has seen enough"])
def test_whoever_stops_playing_leaves_nothing_running(how):
    async def scenario():
        never = asyncio.Event()

        async def hangs(task, attempt):
            if task.id != "task-1":
                await never.wait()

        world, engine, seen = World(hangs), FaultyEngine(lambda request: ANSWER), asyncio.Event()
        playing = collect(
            [task(0), task(1), task(2)], make_player(world, engine), num_rollouts=2, seed=0, observer=Watcher(), finished={}
        )

        async def consume():
            async for _ in playing:
                seen.set()
                if how == "the consumer has seen enough":
                    break
            await playing.aclose()

        consumer = asyncio.create_task(consume())
        await seen.wait()
        assert world.num_open
        if how == "the consumer is cancelled":
            consumer.cancel()
        await asyncio.gather(consumer, return_exceptions=True)
        assert world.num_open == 0
        assert set(engine.released) == {request.id for request in engine.requests}
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(scenario())


def test_a_rollout_of_several_turns_appends_and_never_exceeds_its_budget():
    class ThreeTurns(OneTurn):
        num = 0

        async def step(self, completion, *, num_tokens_left):
            self.num += 1
            ids = () if self.num == 3 else (20 + self.num,)
            return Observation(
                ids=ids,
                text="",
                completion_text="",
                calls=(),
                stop_reason=StopReason.ANSWERED if self.num == 3 else None,
            )

    world = World()
    engine = FaultyEngine(lambda request: ANSWER)
    player = make_player(lambda task, *, seed: ThreeTurns(world, task), engine)
    (group,) = play_all(player, num_rollouts=1)
    (scored,) = group.trajectories
    assert scored.trajectory.ids == [1, 2, 3, 7, 9, 21, 7, 9, 22, 7, 9]
    assert [request.max_tokens for request in engine.requests] == [8, 5, 2]  # 8, less 2 sampled and 1 observed in each turn
    assert [request.at for request in engine.requests] == [0, 5, 8]
    assert [request.extends for request in engine.requests] == ["", engine.requests[0].id, engine.requests[1].id]
    assert engine.released == [engine.requests[-1].id]


class OfLength(OneTurn):
    """The prompt of task n has n tokens."""

    async def start(self):
        self.world.num_open += 1
        return Observation(ids=(1,) * int(self.task.id[5:]), text="", completion_text="", calls=(), stop_reason=None)


def long_and_short(*lengths, engine=None, **options):
    world, watcher = World(), Watcher()
    engine = engine or FaultyEngine(lambda request: ANSWER, kv_tokens=64, max_request_tokens=20)
    player = make_player(lambda task, *, seed: OfLength(world, task), engine)
    groups = []
    try:
        groups = play_all(player, tasks=[task(length) for length in lengths], watcher=watcher, **options)
    finally:
        assert world.num_open == 0
    return {group.task_index: group for group in groups}, watcher


def test_a_task_whose_prompt_leaves_no_room_is_void_with_a_warning_and_the_others_are_played(caplog):
    groups, watcher = long_and_short(5, 13, 12)  # 12 and a response of 8 are what an engine holds
    assert [len(groups[index].trajectories) for index in (5, 13, 12)] == [2, 0, 2]
    assert groups[13].num_void == 2
    assert watcher.of("voided") == [RolloutKey(task_index=13, attempt=attempt) for attempt in (0, 1)]
    assert len([key for key in watcher.of("started") if key.task_index == 13]) == 2  # nobody tries again
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "task 'task-13': its prompt of 13 tokens and sampling.max_tokens = 8 exceed" in warning
    assert watcher.reason in warning


def test_a_batch_whose_every_prompt_leaves_no_room_is_refused():
    with pytest.raises(RequestTooLong, match=r"every task .* task 'task-1[34]': its prompt of 1[34] tokens"):
        long_and_short(13, 14)


def test_a_prompt_that_only_a_lost_engine_could_hold_ends_the_batch_as_the_loss_of_that_engine():
    class Late(OfLength):
        async def start(self):
            if self.task.id == "task-31":
                await is_restarted.wait()
            return await super().start()

    def answer_late(request):
        is_restarted.set()
        return ANSWER

    is_restarted = asyncio.Event()
    large = FaultyEngine(lambda request: ANSWER, max_request_tokens=64, faults={0: Fault.LOSE})
    small = FaultyEngine(answer_late, max_request_tokens=12)  # which goes on with the rollout of task 3
    world = World()
    player = make_player(lambda task, *, seed: Late(world, task), EnginePool([large, small]))
    with pytest.raises(EngineLost, match=r"task 'task-31': .* is lost.*a prompt of 31 tokens and a response of up to 8"):
        play_all(player, tasks=[task(3), task(31)], num_rollouts=1)
    assert world.num_open == 0
