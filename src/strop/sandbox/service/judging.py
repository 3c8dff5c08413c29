"""Answers to compare at the front: cut into pieces that fill the slots, put together again as verdicts come in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from strop.errors import NoNodes, Overloaded, UserError
from strop.sandbox.protocol import PairVerdict, VerifyRequest
from strop.sandbox.service.admission import Admission
from strop.sandbox.service.config import RequestLimits
from strop.sandbox.service.floor import Floor
from strop.sandbox.service.jobs import JudgeJob, Judgement
from strop.sandbox.service.limits import is_readable
from strop.sandbox.service.tally import Tally

_NUM_PAIRS = 16  # what one slot gets while others are free; the floor joins pieces when none is


class Judging:
    """Owns a verify request from its pairs to its last verdict."""

    def __init__(self, limits: RequestLimits, floor: Floor, admission: Admission, tally: Tally) -> None:
        self._limits = limits
        self._floor = floor
        self._admission = admission
        self._tally = tally

    async def verify(self, request: VerifyRequest, client: str) -> AsyncIterator[tuple[int, PairVerdict]]:
        """See `Dispatcher.verify`."""
        limits = self._limits
        if len(request.pairs) > limits.max_pairs:
            raise UserError(f"the request has {len(request.pairs)} pairs, the limit is {limits.max_pairs}.")
        if not 0 < request.pair_wall_s <= limits.max_wall_s:
            raise UserError(f"pair_wall_s is {request.pair_wall_s}; it has to be above 0 and at most {limits.max_wall_s:g}.")
        if (error := self._floor.no_nodes(since=asyncio.get_running_loop().time())) is not None:
            raise error
        judgement = Judgement()
        jobs = self._jobs(judgement, request, client)
        try:
            for job in jobs:
                self._floor.put(job)
            num_open = sum(len(job.open) for job in jobs)
            for index, pair in enumerate(request.pairs):
                if not is_readable(pair, limits):
                    self._tally.verdicts[PairVerdict.UNREADABLE] += 1
                    yield index, PairVerdict.UNREADABLE
            for _ in range(num_open):
                judged = await judgement.verdicts.get()
                if isinstance(judged, NoNodes):
                    raise judged
                index, verdict = judged
                self._tally.verdicts[verdict] += 1
                yield index, verdict
        finally:
            judgement.is_awaited = False
            for job in jobs:
                carrier = job
                while carrier.carrier is not None:
                    carrier = carrier.carrier
                if carrier.open and not carrier.is_awaited:
                    self._floor.withdraw(carrier)

    def _jobs(self, judgement: Judgement, request: VerifyRequest, client: str) -> list[JudgeJob]:
        """Admitted, and not yet on the floor. Raises `Overloaded`."""
        now = asyncio.get_running_loop().time()
        pairs = [(judgement, index, pair) for index, pair in enumerate(request.pairs) if is_readable(pair, self._limits)]
        jobs = [
            JudgeJob(pairs[start : start + _NUM_PAIRS], request.pair_wall_s, client, self._on_end, now=now)
            for start in range(0, len(pairs), _NUM_PAIRS)
        ]
        for number, job in enumerate(jobs):
            if refusal := self._admission.admit(client, job.num_bytes):
                for admitted in jobs[:number]:
                    self._on_end(admitted)
                raise Overloaded(refusal)
        return jobs

    def _on_end(self, job: JudgeJob) -> None:
        self._admission.release(job.client, job.num_bytes)
