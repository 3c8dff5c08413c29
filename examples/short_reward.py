"""A reward: short answers are better."""

from pydantic import Field

from strop import Reward


class Short(Reward):
    class Config(Reward.Config):
        length: int = Field(default=20, ge=1, le=10**6, description="Letters of an answer that gets half of the reward.")

    def score(self, task, trajectory):
        return self.config.length / (self.config.length + len(trajectory.text))
