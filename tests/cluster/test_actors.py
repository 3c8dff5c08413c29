"""Processes that make each call together."""

import os
import time
from operator import methodcaller
from pathlib import Path

import pytest

from strop.cluster.actors import ActorGroup
from strop.errors import ActorsFailed, ActorsLost, ConfigError


class Sleeper:
    """Answers at once, but for rank 1."""

    def __init__(self, rank):
        self.rank = rank

    def __call__(self, name):
        if self.rank == 1:
            time.sleep(600)
        return name


class Breaker(Sleeper):
    """Breaks in rank 0, for which rank 1 waits."""

    def __call__(self, name):
        if self.rank == 0:
            raise RuntimeError("no memory")
        return super().__call__(name)


@pytest.mark.slow  # starts Ray
@pytest.mark.parametrize(
    ("kind", "of_ranks", "raised", "said"),
    [
        (methodcaller, ("missing", "upper"), ActorsFailed, r"^rank 0 of 2 of the test .* broke during text: AttributeError"),
        (Breaker, (0, 1), ConfigError, r"test_actors.py, line \d+\) raised RuntimeError: no memory"),  # this file is a user's
    ],
)
def test_an_error_in_one_process_is_no_loss_of_it(monkeypatch, kind, of_ranks, raised, said):
    monkeypatch.setattr("strop.cluster.actors._GRACE_S", 2.0)
    actors = ActorGroup(2, what="the test", key="the test", timeout_s=60.0)
    try:
        actors.make(kind, [(each,) for each in of_ranks])
        with pytest.raises(raised, match=said):
            actors.call("text")
        with pytest.raises(ActorsLost):
            actors.call("again")
    finally:
        actors.close()


@pytest.mark.slow  # starts Ray
def test_a_process_that_hangs_is_named_when_its_time_is_over(monkeypatch):
    monkeypatch.setattr("strop.cluster.actors._GRACE_S", 2.0)
    actors = ActorGroup(2, what="the test", key="the test", timeout_s=60.0)
    try:
        actors.make(Sleeper, [(0,), (1,)])
        pids = [each.pid for each in actors.processes]
        assert os.getpid() not in pids
        actors._timeout_s = 1.0
        with pytest.raises(ActorsLost, match=r"^rank 1 of 2 of the test \(process \d+\) gave no answer to wait"):
            actors.call("wait")
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    finally:
        actors.close()
