"""What a batch came to, in figures."""

from __future__ import annotations

import asyncio

import pytest
from pools import pool_of
from virtual_time import run
from worlds import FragileEngine

from strop.engine.protocol import CompletionRequest
from strop.engine.scripted import Reply
from strop.types import RolloutKey


def test_the_metrics_of_a_step_can_be_redone_by_hand():
    """One engine of two rows; two rollouts of one turn, the first 3 tokens (0.3 s) and the second 5 (0.5 s)."""

    class Counting(FragileEngine):
        def _reply(self, request, number):
            length = 3 if request.id.startswith("0") else 5
            return Reply(ids=(1,) * (length - 1) + (9,), logprobs=(0.0,) * length, entropies=(0.0,) * length)

    async def scenario():
        pool = pool_of(Counting(max_running=2, max_request_tokens=10, kv_tokens=20))
        keys = [RolloutKey(task_index=0, attempt=attempt) for attempt in range(3)]

        async def converse(lease, number):
            await lease.complete(
                CompletionRequest(
                    id=f"{number}", ids=(1, 2), max_tokens=8, stop_ids=frozenset({9}), temperature=1.0, seed=number
                )
            )
            lease.close()

        async with pool.batch() as batch:
            leases = [await batch.offer(key, (1, 2), max_tokens=8) for key in keys]
            await asyncio.gather(*(converse(lease, number) for number, lease in enumerate(leases)))
        return pool.last_batch

    report = run(scenario)
    metrics = report.as_metrics()
    # Row 1: 0 to 0.3, then the third rollout from 0.3 to 0.8; row 2: 0 to 0.5. The queue is empty from 0.3 on.
    assert report.duration_s == pytest.approx(0.8)
    assert metrics["scheduler/row_share"] == pytest.approx((0.3 + 0.5 + 0.5) / (2 * 0.8))
    assert metrics["scheduler/busy_share"] == pytest.approx(1.0)
    assert metrics["scheduler/tail_idle_share"] == pytest.approx(0.0)
    assert metrics["scheduler/kv_share_mean"] == pytest.approx((0.5 * 1.0 + 0.3 * 0.5) / 0.8)
    assert metrics["scheduler/queue_mean"] == pytest.approx(0.3 / 0.8, rel=0.01)
    assert metrics["scheduler/queue_max"] == 1
    assert metrics["scheduler/queue_wait_mean_s"] == pytest.approx(0.1)
    assert metrics["scheduler/longest_rollout_s"] == pytest.approx(0.5)
    assert metrics["scheduler/longest_rollout_tokens"] == 5
    timeline = report.as_timeline()
    assert timeline["engines"][0]["rows"][0] == 2
    assert timeline["engines"][0]["rows"][-1] == 1
    assert timeline["queue"][0] == 1
