"""Opens the tasks that a recipe names for a stage; what is wrong with them is told with the stage and its key."""

from __future__ import annotations

from strop.errors import ConfigError, TaskError
from strop.pipelines.recipe import Recipe
from strop.tasks import TaskSource, make_tasks
from strop.tasks.config import Split, TaskConfig


def open_tasks(recipe: Recipe, name: str, tasks: TaskConfig, *, seed: int, split: Split) -> TaskSource:
    """What `make_tasks` gives for `tasks` of the stage `name`: its own, or others that its schedule brings.

    Raises:
        ConfigError, TaskError: as `make_tasks` does, behind the key that says where the rows come from.
    """
    try:
        return make_tasks(tasks, seed=seed, split=split)
    except (ConfigError, TaskError) as error:
        key = "tasks" if tasks == recipe.stages[name].tasks else "schedule.tasks"
        raise type(error)(f"stages.{name}.{key}: {error}") from error
