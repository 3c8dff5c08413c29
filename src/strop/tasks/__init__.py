"""Where problems come from."""

from strop.tasks.protocol import Split, TaskSource, make_tasks
from strop.tasks.rows import RowTasks, iterate_rows, load_rows, open_rows

__all__ = ["RowTasks", "Split", "TaskSource", "iterate_rows", "load_rows", "make_tasks", "open_rows"]
