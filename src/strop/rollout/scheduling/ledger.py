"""What has happened so far, counted once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from strop.rollout.scheduling.actions import Why


@dataclass(slots=True)
class Ledger:
    """Counts since the scheduler began. `offered + branched = ended + those that are still there`, after every event."""

    offered: int = 0
    branched: int = 0
    ended: int = 0
    runs: Counter[Why] = field(default_factory=Counter)
    turns: int = 0  # completions that came back and counted
    sampled_tokens: int = 0  # of these completions
    observation_tokens: int = 0
    tool_turns: int = 0  # turns whose tools were answered
    lost_turns: int = 0  # completions under way on an engine that died
    stale_answers: int = 0  # completions that came back after their engine was given up, or their rollout ended; not counted
    branches_refused: int = 0
    suspended: int = 0  # rollouts that gave their memory back while a slow tool ran
    recomputed_tokens: int = 0  # that an engine has to compute though one had them: after a suspension, a death, an eviction
    tool_wait_s: float = 0.0  # between a turn's end and the start of its tools
    tool_run_s: float = 0.0  # between the start of the tools and the last answer
    queue_wait_s: float = 0.0  # between the offer and the first run
    longest_rollout_s: float = 0.0  # between the first run and the end
    longest_rollout_tokens: int = 0  # of one response, observations included

    def as_metrics(self) -> Mapping[str, float]:
        names = [name for name in self.__dataclass_fields__ if name != "runs"]
        counts = {f"scheduler/{name}": float(getattr(self, name)) for name in names}
        return counts | {f"scheduler/runs_{why}": float(self.runs[why]) for why in Why}
