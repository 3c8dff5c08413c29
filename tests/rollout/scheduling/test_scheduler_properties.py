"""What holds after any sequence of events, engine deaths included."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.rollout.scheduler.admission import EngineSpec
from strop.rollout.scheduler.scheduler import Action, CallTools, Release, Run, SchedulerConfig, make_scheduler
from strop.types import RolloutKey


@dataclass
class Driver:
    """Plays engines and tools at random, and keeps its own books to hold the scheduler's against."""

    seed: int
    config: SchedulerConfig
    now_s: float = 0.0
    running: dict[RolloutKey, Run] = field(default_factory=dict)
    calling: dict[RolloutKey, int] = field(default_factory=dict)  # tokens that are left
    engines: dict[str, EngineSpec] = field(default_factory=dict)
    stale: list[Run] = field(default_factory=list)
    ended: Counter[RolloutKey] = field(default_factory=Counter)
    first_runs: list[RolloutKey] = field(default_factory=list)
    offered: list[RolloutKey] = field(default_factory=list)
    sampled: int = 0
    num_engines: int = 0
    num_groups: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.scheduler = make_scheduler(self.config)

    def tell(self, event: str, *arguments: object, **named: object) -> None:
        self.now_s += self.random.random()
        for action in getattr(self.scheduler, event)(self.now_s, *arguments, **named):
            self.do(action)
        assert not self.started_by_another_refill()
        for name in self.engines:
            assert 0 <= self.reserved_share(name) <= self.config.oversubscription
        ledger, live = self.scheduler.ledger, self.scheduler.live
        assert ledger.offered + ledger.branched == ledger.ended + len(live)
        assert live == set(self.running) | set(self.calling) | set(self.scheduler.waiting)
        assert ledger.sampled_tokens == self.sampled
        assert ledger.ended == sum(self.ended.values())

    def started_by_another_refill(self) -> list[Action]:
        """The scheduler skips the search where nothing has changed. What does it find after all?"""
        scheduler = self.scheduler
        scheduler._actions, scheduler._queue.has_changed = [], True
        scheduler._refill()
        scheduler._queue.has_changed = False
        return scheduler._actions

    def reserved_share(self, name: str) -> float:
        changes = self.scheduler.usage[name].kv_share.changes
        return changes[-1][1] if changes else 0.0

    def do(self, action: Action) -> None:
        if isinstance(action, Run):
            assert action.engine in self.engines
            assert action.key not in self.running
            assert not self.ended[action.key]
            self.running[action.key] = action
            if action.run == 1 and action.key in self.offered:
                self.first_runs.append(action.key)
        elif isinstance(action, CallTools):
            assert action.key in self.calling
        elif isinstance(action, Release):
            self.running.pop(action.key, None)

    def join(self) -> None:
        self.num_engines += 1
        spec = EngineSpec(
            name=f"engine-{self.num_engines}",
            kv_blocks=self.random.randint(12, 40),
            block_tokens=self.random.choice([4, 10, 16]),
            max_conversations=self.random.randint(1, 6),
        )
        self.engines[spec.name] = spec
        self.tell("engine_joined", spec)

    def offer(self) -> None:
        prompt_tokens = self.random.randint(1, 18)
        self.num_groups += 1
        for attempt in range(self.random.randint(1, 5)):
            key = RolloutKey(task_index=self.num_groups - 1, attempt=attempt)
            self.offered.append(key)
            self.tell("offered", key, prompt_tokens=prompt_tokens, max_tokens=self.random.randint(1, 30))

    def offer_more(self) -> None:
        """More rollouts of a task that was there before, with another prompt."""
        attempts = range(len(self.offered) + 10, len(self.offered) + 10 + self.random.randint(1, 2))
        task = self.random.randrange(self.num_groups)
        tokens = self.random.randint(1, 18)
        for attempt in attempts:
            key = RolloutKey(task_index=task, attempt=attempt)
            self.offered.append(key)
            self.tell("offered", key, prompt=tokens, prompt_tokens=tokens, max_tokens=30)

    def answer(self) -> None:
        key = self.random.choice(list(self.running))
        run = self.running.pop(key)
        num_tokens = self.random.randint(1, max(1, run.max_tokens))
        if run.max_tokens < 1:
            self.end(key, run, 0)
        elif num_tokens == run.max_tokens or self.random.random() < 0.4:
            self.end(key, run, num_tokens)
        elif self.random.random() < 0.3:
            self.sampled += num_tokens
            self.tell("piece_finished", key, run=run.run, num_tokens=num_tokens)
        else:
            self.sampled += num_tokens
            self.calling[key] = run.max_tokens - num_tokens
            self.tell("turn_finished", key, run=run.run, num_tokens=num_tokens)
            self.tell("tool_started", key)

    def end(self, key: RolloutKey, run: Run, num_tokens: int) -> None:
        self.sampled += num_tokens
        self.calling[key] = 0
        self.tell("turn_finished", key, run=run.run, num_tokens=num_tokens)
        del self.calling[key]
        self.ended[key] += 1
        self.tell("ended", key)

    def tool(self) -> None:
        key = self.random.choice(list(self.calling))
        left = self.calling.pop(key)
        self.tell("tool_finished", key, num_tokens=self.random.randint(0, left - 1))

    def cancel(self) -> None:
        key = self.random.choice(sorted(self.scheduler.live))
        self.ended[key] += 1
        self.running.pop(key, None)
        self.calling.pop(key, None)
        self.tell("ended", key)

    def branch(self) -> None:
        parent = self.random.choice(list(self.running))
        number = sum(self.ended.values()) + len(self.scheduler.live)
        key = RolloutKey(task_index=parent.task_index, attempt=parent.attempt, branch=1000 + number)
        self.tell("branch_requested", key, parent=parent, max_tokens=self.running[parent].max_tokens)

    def die(self) -> None:
        name = self.random.choice(list(self.engines))
        lost = [key for key, run in self.running.items() if run.engine == name]
        self.stale += [self.running.pop(key) for key in lost]
        del self.engines[name]
        self.tell("engine_died", name)

    def late_answer(self) -> None:
        run = self.stale.pop()
        self.tell("turn_finished", run.key, run=run.run, num_tokens=1)

    def step(self) -> None:
        choices = [self.join] if len(self.engines) < 4 else []
        takers = list(self.engines)
        if takers and any(self.engines[name].kv_blocks * self.engines[name].block_tokens >= 64 for name in takers):
            choices += [self.offer] + [self.offer_more] * bool(self.num_groups)
        choices += [self.answer] * 6 if self.running else []
        choices += [self.branch] if self.running else []
        choices += [self.tool] * 5 if self.calling else []
        choices += [self.cancel] if self.scheduler.live and self.random.random() < 0.3 else []
        choices += [self.die] if self.engines and self.random.random() < 0.3 else []
        choices += [self.late_answer] if self.stale else []
        self.random.choice(choices or [self.join])()

    def finish(self) -> None:
        """No more faults: everything that is left ends."""
        spec = EngineSpec(name="last", kv_blocks=100, block_tokens=10, max_conversations=3)
        self.engines["last"] = spec
        self.tell("engine_joined", spec)
        while self.running or self.calling:
            (self.answer if self.running else self.tool)()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    order=st.sampled_from(["fifo", "longest_first"]),
    oversubscription=st.sampled_from([1.0, 1.7]),
)
def test_reservations_fit_everyone_ends_once_and_the_ledger_is_exact_whatever_dies(
    seed: int, order: str, oversubscription: float
) -> None:
    config = SchedulerConfig.model_validate({"order": order, "oversubscription": oversubscription})
    driver = Driver(seed, config)
    driver.join()
    for _ in range(120):
        driver.step()
    driver.finish()
    assert not driver.scheduler.live
    assert all(driver.reserved_share(name) == 0 for name in driver.engines)
    assert set(driver.offered) <= set(driver.ended)
    assert set(driver.ended.values()) <= {1}


@pytest.mark.parametrize("seed", range(3))
def test_equals_start_in_the_order_of_their_offer(seed: int) -> None:
    driver = Driver(seed, SchedulerConfig(order="fifo"))
    spec = EngineSpec(name="only", kv_blocks=12, block_tokens=10, max_conversations=4)
    driver.engines["only"] = spec
    driver.tell("engine_joined", spec)
    for _ in range(100):
        choices = [driver.offer] + [driver.answer] * (3 * bool(driver.running)) + [driver.tool] * (3 * bool(driver.calling))
        driver.random.choice(choices)()
    assert len(driver.first_runs) > 10
    assert driver.first_runs == driver.offered[: len(driver.first_runs)]


@pytest.mark.parametrize("seed", range(3))
def test_on_several_engines_groups_still_start_one_after_the_other(seed: int) -> None:
    driver = Driver(seed, SchedulerConfig(order="fifo"))
    for name in ("a", "b", "c"):
        driver.engines[name] = EngineSpec(name=name, kv_blocks=12, block_tokens=10, max_conversations=4)
        driver.tell("engine_joined", driver.engines[name])
    for _ in range(200):
        choices = [driver.offer] + [driver.answer] * (3 * bool(driver.running)) + [driver.tool] * (3 * bool(driver.calling))
        driver.random.choice(choices)()
    groups = [key.task_index for key in driver.first_runs]
    assert len(set(groups)) > 10
    assert groups == sorted(groups)
