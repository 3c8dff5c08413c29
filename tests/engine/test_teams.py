"""Teams of threads that nobody needs any more."""

import threading
from pathlib import Path

import pytest
import torch

from strop.engine.teams import _pause, end_team


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def _num_threads():
    [line] = [
        line for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines() if line.startswith("Threads:")
    ]
    return int(line.split()[1])


def test_a_thread_that_ends_its_team_leaves_none_behind_and_computes_on(two_threads):
    if _pause() is None:
        pytest.skip("torch does not use libgomp here")
    numbers = torch.ones(1 << 20)
    found = []

    def compute():
        before = _num_threads()
        total = numbers.exp().sum()
        with_team = _num_threads()
        end_team()
        found.extend([with_team - before, _num_threads() - before])
        assert torch.equal(numbers.exp().sum(), total)
        end_team()

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert found == [1, 0]
