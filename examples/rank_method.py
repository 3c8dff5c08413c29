"""A method: the advantage of a rollout is its rank in its group, from -1 to 1."""

import torch
from pydantic import Field

from strop.algorithms.grpo import GRPO


class RankAdvantage(GRPO):
    """GRPO with ranks in place of normalized rewards: the size of a reward does not matter, only the order."""

    class Config(GRPO.Config):
        """Keys of the method."""

        scale: float = Field(default=1.0, gt=0, le=100, description="The advantage of the best rollout.")

    def advantages(self, selections):
        found = []
        for selection in selections:
            rewards = torch.tensor([scored.reward for scored in selection.kept])
            below = (rewards[:, None] > rewards[None, :]).sum(1) - (rewards[:, None] < rewards[None, :]).sum(1)
            ranks = self.config.scale * below / max(1, len(rewards) - 1)
            lengths = [len(scored.trajectory.ids) for scored in selection.kept]
            found.append([rank * torch.ones(length) for rank, length in zip(ranks, lengths, strict=True)])
        return found
