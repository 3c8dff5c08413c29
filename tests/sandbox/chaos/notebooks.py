"""Sessions whose cells count how often they ran: none ever runs twice, and what was lost is said to be lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from strop.errors import MachineError, SessionLost
from strop.sandbox.client import SandboxClient
from strop.sandbox.protocol import RunOutcome, RunRequest, SessionLimits
from strop.sandbox.sandbox import Session

_LEASE_S = 10.0  # of one whose name was lost on the way
_MAX_CELLS = 40
_PAUSE_S = 0.05
_CELL = "n = globals().get('n', 0) + 1\nprint({number}, n)"


@dataclass(slots=True)
class Notebooks:
    """Plays one session after the other until it is asked to stop."""

    num_cells: int = 0
    num_sessions: int = 0
    num_lost: int = 0
    num_refused: int = 0  # sessions that could not be opened or forked, with a fault of ours
    wrong: list[str] = field(default_factory=list)

    async def play(self, client: SandboxClient, *, stop: asyncio.Event) -> None:
        while not stop.is_set():
            try:
                session = await Session.open(client, SessionLimits(profile="bare", lease_s=_LEASE_S))
            except MachineError:
                self.num_refused += 1
                await asyncio.sleep(_PAUSE_S)
                continue
            self.num_sessions += 1
            await self._play_one(session, stop)

    async def _play_one(self, session: Session, stop: asyncio.Event) -> None:
        try:
            for turn in range(1, _MAX_CELLS + 1):
                if stop.is_set():
                    break
                number = 1000 * self.num_sessions + turn
                result = await session.run(RunRequest(code=_CELL.format(number=number)))
                self.num_cells += 1
                if (result.outcome, result.text) != (RunOutcome.STDOUT, f"{number} {turn}\n"):
                    self.wrong.append(f"cell {turn} of {session.name}: {result}")
                await asyncio.sleep(_PAUSE_S)
            await session.close()
        except SessionLost:
            self.num_lost += 1

    def check(self) -> None:
        assert not self.wrong, f"{len(self.wrong)} cells were answered wrongly, or ran twice; first {self.wrong[0]}"
        assert self.num_cells > 0, "no cell was played"

    def summary(self) -> str:
        return (
            f"{self.num_cells} cells of {self.num_sessions} sessions, {self.num_lost} of them lost; "
            f"{self.num_refused} could not be opened"
        )
