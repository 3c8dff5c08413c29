"""An environment of several turns: the policy guesses a number, and is told whether it is larger."""

import re

from strop import Reward, Task, TextEnvironment, Trajectory


class GuessTheNumber(TextEnvironment):
    """Answers "Too low.", "Too high." or "Correct."."""

    def reset(self, task: Task) -> str:
        self.secret = int(task.answer)
        return "I am thinking of a whole number. Guess it."

    def step(self, reply: str) -> tuple[str, bool]:
        numbers = re.findall("[0-9]{1,9}", reply)
        guess = int(numbers[-1]) if numbers else -1
        if guess == self.secret:
            return "Correct.", True
        return ("Too low." if guess < self.secret else "Too high."), False


class FewGuesses(Reward):
    """1 for the number at the first guess, less for later ones. Without it a little for each number that was guessed."""

    def score(self, task: Task, trajectory: Trajectory) -> dict[str, float]:
        is_solved = trajectory.turns[-1].observation_text == "Correct."
        digits = sum(letter.isdigit() for turn in trajectory.turns for letter in turn.completion_text)
        return {"accuracy": is_solved / len(trajectory.turns), "digits": 0.01 * min(digits, 10)}
