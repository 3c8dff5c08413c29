"""Answers to compare in the queue: cut for the slots, each pair with one verdict."""

from __future__ import annotations

import asyncio

import pytest
from dispatching import dispatching, judged, node, pairs
from links import until

from strop.errors import UserError
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest


def test_pairs_are_spread_over_slots() -> None:
    async def play() -> None:
        one = node(slots=2, latency_s=0.001)
        async with dispatching(one) as front:
            verdicts = await judged(front, VerifyRequest(pairs=pairs(64)))
            assert one.num_verify_calls == 2  # 32 each
            assert verdicts == {n: PairVerdict.EQUAL if n % 2 else PairVerdict.UNEQUAL for n in range(64)}
            one.num_slots = 1
            many = await asyncio.gather(*(judged(front, VerifyRequest(pairs=pairs(16))) for _ in range(9)))
            assert [len(verdicts) for verdicts in many] == [16] * 9
            assert front.admission.held.num == 0

    asyncio.run(play())


def test_answers_without_an_encoding_or_a_bearable_length_are_unreadable_alone() -> None:
    async def play() -> None:
        async with dispatching(node()) as front:
            odd = (
                AnswerPair(gold="\ud800", answer="1"),
                AnswerPair(gold="1", answer="1"),
                AnswerPair(gold="1", answer="1" * 70_000),
            )
            assert await judged(front, VerifyRequest(pairs=odd)) == {0: "unreadable", 1: "equal", 2: "unreadable"}
            assert await judged(front, VerifyRequest(pairs=())) == {}
            with pytest.raises(UserError):
                await judged(front, VerifyRequest(pairs=odd, pair_wall_s=float("nan")))

    asyncio.run(play())


def test_a_reader_of_verdicts_who_leaves_withdraws_the_rest() -> None:
    async def play() -> None:
        one = node(slots=1, latency_s=0.01)
        async with dispatching(one) as front:
            verdicts = front.verify(VerifyRequest(pairs=pairs(600)))
            await anext(verdicts)
            await verdicts.aclose()
            await until(lambda: front.admission.held.num == 0 and one.num_in_flight == 0)

    asyncio.run(play())
