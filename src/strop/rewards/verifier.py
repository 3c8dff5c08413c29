"""Judges whether a prediction equals the gold answer; what needs algebra is asked of a code service, many pairs at a time.

A pair that reaches its deadline is the policy's doing: it counts as not equal, with an outcome of its own, or a policy would
learn to hang the judge. A judge that is lost is ours: `MachineError`, never a wrong answer (law 3).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from strop.errors import MachineError
from strop.rewards.grading import equal_by_text, left_to_algebra
from strop.rewards.service import AnswerService
from strop.rewards.spelling import cleaned, could_be_an_answer, equal_by_spelling
from strop.sandbox.numbers import plain_number
from strop.sandbox.protocol import AnswerPair, PairVerdict, VerifyRequest
from strop.sandbox.verify_process import ProcessVerifier

_GATHER_S = 0.003  # rollouts that end together are judged together; nobody notices the wait
_MAX_PAIRS = 256  # in one request


class Verdict(StrEnum):
    """What became of one comparison."""

    EXACT = "exact"  # plain numbers or equal texts, compared here
    CORRECT = "correct"
    WRONG = "wrong"
    UNREADABLE = "unreadable"  # one of the two is no mathematics
    TIMEOUT = "timeout"

    @property
    def is_correct(self) -> bool:
        return self in (Verdict.EXACT, Verdict.CORRECT)


_VERDICTS = {
    PairVerdict.EQUAL: Verdict.CORRECT,
    PairVerdict.UNEQUAL: Verdict.WRONG,
    PairVerdict.UNREADABLE: Verdict.UNREADABLE,
    PairVerdict.TIMEOUT: Verdict.TIMEOUT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Question:
    pair: AnswerPair
    verdict: asyncio.Future[PairVerdict]


class MathVerifier:
    """Gathers the questions of a few milliseconds into one request. Belongs to the event loop in which it was first used.

    Fused, it asks two graders, of which either will do, in the order of rStar2-Agent's released code (`compute_score.py`): a
    Prime-style one, text and then sympy, which is `grading` here, and math_verify. One child asks both within one deadline. The
    last try of that code's first grader, by numbers with a tolerance and with 3.14 for pi, is left out: near is not right.

    Args:
        service: compares what is no plain number; processes of its own, started when first needed, where there is none.
        deadline_s: of each pair.
        is_fused: what `grading` calls equal is right too, else what math_verify does alone.
    """

    def __init__(self, service: AnswerService | None = None, *, deadline_s: float = 2.0, is_fused: bool = False) -> None:
        self.deadline_s = deadline_s
        self._is_fused = is_fused
        self._own: ProcessVerifier | None = None
        if service is None:
            service = self._own = ProcessVerifier()
        self._service = service
        self._gathered: list[_Question] = []
        self._requests: set[asyncio.Task[None]] = set()
        self._is_closed = False
        self._readable: dict[str, bool] = {}

    async def verify(self, gold: str, prediction: str) -> Verdict:
        """Whether `prediction` equals `gold`, which come in this order: math_verify is not symmetric.

        Raises:
            MachineError: the service was lost, or could not judge this pair.
        """
        gold, prediction = cleaned(gold), cleaned(prediction)
        is_equal = equal_by_spelling(gold, prediction)
        if is_equal is not None:
            return Verdict.EXACT if is_equal else Verdict.WRONG
        left = _left_by_text(gold, prediction) if self._is_fused else None
        if left == []:
            return Verdict.EXACT
        return _VERDICTS[await self._compare(gold, prediction, left or ())]

    async def can_read(self, gold: str) -> bool:
        """Whether an answer can be compared with `gold`, prose among it, which is compared as text; asked once for each text.

        Raises:
            MachineError: as `verify`.
        """
        if gold not in self._readable:
            self._readable[gold] = could_be_an_answer(gold) and (
                plain_number(gold) is not None or await self._compare(gold, gold) is not PairVerdict.UNREADABLE
            )
        return self._readable[gold]

    async def _compare(self, gold: str, prediction: str, differences: Sequence[tuple[str, str]] = ()) -> PairVerdict:
        if self._is_closed:
            raise MachineError("the verifier was closed; an answer came after that")
        loop = asyncio.get_running_loop()
        pair = AnswerPair(gold=gold, answer=prediction, differences=tuple(differences))
        question = _Question(pair=pair, verdict=loop.create_future())
        if not self._gathered:
            loop.call_later(_GATHER_S, self._ask)
        self._gathered.append(question)
        if len(self._gathered) == _MAX_PAIRS:
            self._ask()
        verdict = await question.verdict
        if verdict is PairVerdict.INTERNAL:
            raise MachineError(f"the answer verifier failed twice on one pair: {gold!r}, {prediction!r:.200}.")
        return verdict

    async def close(self) -> None:
        """End what is still being compared, and the verifier's own processes. Safe to call twice."""
        self._is_closed = True
        self._ask()
        for request in self._requests:
            request.cancel()
        await asyncio.gather(*self._requests, return_exceptions=True)
        if self._own is not None:
            await self._own.close()

    def _ask(self) -> None:
        questions = [question for question in self._gathered if not question.verdict.done()]
        self._gathered.clear()
        if questions:
            request = asyncio.get_running_loop().create_task(self._request(questions))
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)

    async def _request(self, questions: list[_Question]) -> None:
        request = VerifyRequest(pairs=tuple(question.pair for question in questions), pair_wall_s=self.deadline_s)
        fault: Exception = MachineError("the answer verifier was closed, or did not judge every pair")
        try:
            async for index, verdict in self._service.verify(request):
                if not questions[index].verdict.done():  # else whoever asked is gone
                    questions[index].verdict.set_result(verdict)
        except MachineError as error:
            fault = error
        finally:
            for question in questions:
                if not question.verdict.done():
                    question.verdict.set_exception(fault)


def _left_by_text(gold: str, prediction: str) -> list[tuple[str, str]] | None:
    """What the texts leave to sympy, which is nothing where they are equal; None where they are not, whatever it would find."""
    is_equal = equal_by_text(gold, prediction)
    if is_equal is None:
        return left_to_algebra(gold, prediction)
    return [] if is_equal else None
