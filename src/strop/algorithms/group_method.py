"""Settings that all methods share which compare the rollouts of one task with each other."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from strop.algorithms.advantages import Advantage
from strop.algorithms.policy_loss import PolicyLoss
from strop.algorithms.selection import WHOLE_REWARD


class GroupMethod(PolicyLoss):
    """What a reward is compared with, and which rollouts and groups have no part in it."""

    advantage: Advantage = Advantage.GROUP_NORMALIZED
    eps: float = Field(default=1e-6, ge=0)  # added to the std of rewards
    drop_tied: bool = False  # True: leave groups with equal rewards out, which makes the remaining tokens weigh more
    # What is equal in a tied group: the reward, or a part of it that says what is right. DAPO section 3.2 leaves groups out
    # whose answers are all right or all wrong, whatever they are penalised for besides.
    tied_by: str = Field(default=WHOLE_REWARD, min_length=1)
    # Dynamic sampling, DAPO (arXiv:2503.14476) section 3.2: play further tasks in place of those that were left out.
    refill_rounds: int = Field(default=0, ge=0)  # at most so often in a step
    overlong_filter: bool = False  # leave out what was cut off; harmful: rStar2-Agent (arXiv 2508.20722) 4.3.1

    @model_validator(mode="after")
    def _leaves_out_what_it_says(self) -> Self:
        if self.refill_rounds and not self.drop_tied:
            raise ValueError(
                f"method.refill_rounds is {self.refill_rounds}, which plays further tasks in place of groups that are left out,"
                " but method.drop_tied is false: tied groups stay. Set drop_tied = true (dynamic sampling), or remove it."
            )
        if self.tied_by != WHOLE_REWARD and not self.drop_tied:
            raise ValueError(
                f"method.tied_by is {self.tied_by!r}, which says what groups are left out, but method.drop_tied is false: none"
                " is. Set drop_tied = true, or remove tied_by."
            )
        return self
