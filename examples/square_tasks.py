"""A source of tasks: squares of whole numbers."""

from pydantic import Field

from strop import Task, TaskSource


class Squares(TaskSource):
    class Config(TaskSource.Config):
        largest: int = Field(default=20, ge=1, le=10**6, description="The largest number to square.")

    def task(self, index):
        number = 1 + (self.seed + 7919 * index) % self.config.largest
        return Task(id=f"square-{index}", question=f"{number} squared?", answer=str(number**2), source="squares")
