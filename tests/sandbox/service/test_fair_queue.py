"""The queue is fair by client and loses nothing."""

from __future__ import annotations

from collections import defaultdict, deque

from hypothesis import given
from hypothesis import strategies as st

from strop.sandbox.local import FairQueue


def test_a_lone_item_is_next_though_another_client_has_45_000() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(45_000):
        queue.push("many", f"many {number}")
    queue.push("lone", "lone")
    assert [queue.pop(), queue.pop(), queue.pop()] == ["many 0", "lone", "many 1"]


steps = st.lists(st.tuples(st.sampled_from(["push", "push", "first", "pop", "remove"]), st.integers(0, 3), st.integers(0, 30)))


@given(steps)
def test_it_does_what_a_list_for_each_client_does(script: list[tuple[str, int, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    model: defaultdict[str, deque[int]] = defaultdict(deque)
    turns: list[str] = []
    for number, (what, client_number, which) in enumerate(script):
        client = str(client_number)
        if what in ("push", "first"):
            if not model[client]:
                turns.append(client)
            queue.push(client, number, is_first=what == "first")
            model[client].insert(0, number) if what == "first" else model[client].append(number)
        elif what == "pop" and turns:
            turn = turns.pop(0)
            assert queue.pop() == model[turn].popleft()
            if model[turn]:
                turns.append(turn)
        elif what == "remove":
            is_there = which in model[client]
            assert queue.remove(client, which) == is_there
            if is_there:
                model[client].remove(which)
                if not model[client]:
                    turns.remove(client)
        assert len(queue) == sum(map(len, model.values()))
