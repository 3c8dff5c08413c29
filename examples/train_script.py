"""Trains from Python, without a TOML file: python examples/train_script.py MODEL_DIRECTORY"""

import sys

from strop import RL, Reward, train


class Digits(Reward):
    """The share of an answer that is digits."""

    def score(self, task, trajectory):
        return sum(letter.isdigit() for letter in trajectory.text) / max(1, len(trajectory.text))


if __name__ == "__main__":
    rl = RL(
        tasks={"kind": "arithmetic", "num_terms": 2, "max_digits": 1},
        prompt="plain",
        reward=Digits(),
        method="grpo",
        steps=1,
        tasks_per_step=2,
        group_size=4,
        sampling={"max_tokens": 24},
    )
    train(name="train-script", threads=1, model=sys.argv[1], engine={"slots": 8, "max_length": 128}, stages=[rl])
