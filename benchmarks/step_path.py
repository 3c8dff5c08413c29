"""The files of strop that one RL step of the demo enters, with their code lines.

python benchmarks/step_path.py runs recipes/demo.toml at a tiny size. It prints each file of which a function is called
between the end of the first RL step and the end of the second. Trainer, embedded engine, scheduler, tools,
rewards and sandbox client are in this process; what child processes execute is not counted. Code lines leave out blank
lines, comments and docstrings.
"""

from __future__ import annotations

import ast
import asyncio
import io
import sys
import tempfile
import threading
import tokenize
from collections.abc import Mapping
from pathlib import Path
from types import CodeType, FrameType

import strop

PACKAGE = Path(strop.__file__).parent
DEMO = PACKAGE.parents[1] / "recipes" / "demo.toml"
TINY = [  # the smallest sizes at which the policy calls its tool and gets rewards that differ
    "threads=1",
    "tasks.num_terms=2",
    "tasks.min_digits=1",
    "tasks.max_digits=1",
    "engine.slots=24",
    "engine.max_length=256",
    "sampling.max_tokens=128",
    "limits.max_response_tokens=48",
    "stages.base.tiny.hidden_size=64",
    "stages.base.tiny.num_layers=2",
    "stages.base.tiny.num_heads=2",
    "stages.base.tiny.intermediate_size=128",
    "stages.base.tiny.vocab_size=384",
    "stages.base.tiny.num_texts=64",
    "stages.sft.num_demonstrations=96",
    "stages.sft.steps=120",
    "stages.sft.batch_size=16",
    "stages.sft.trainer.optimizer.lr=5e-3",
    "stages.sft.trainer.optimizer.warmup_updates=5",
    "stages.before.num_tasks=1",
    "stages.rl.steps=2",
    "stages.rl.tasks_per_step=4",
    "stages.rl.group_size=4",
]


def code_lines(source: str) -> int:
    """Return the number of lines of `source` that are neither blank nor part of a comment or docstring."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    ignored = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in ignored:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - docstrings)


class Tracer:
    """Records the functions that are called while it is on, in every thread that starts after it was installed."""

    def __init__(self) -> None:
        self.is_on = False
        self.called: set[CodeType] = set()
        threading.setprofile(self)
        sys.setprofile(self)

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        # A profiler also sees a "call" where a coroutine or generator goes on. There the argument of RESUME is not 0.
        if self.is_on and event == "call" and not frame.f_code.co_code[frame.f_lasti + 1] & 3:
            self.called.add(frame.f_code)

    def remove(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    @property
    def functions(self) -> dict[Path, set[str]]:
        """The names of the functions of strop that were called, by file. Running a module's body is not a call."""
        found: dict[Path, set[str]] = {}
        for code in self.called:
            path = Path(code.co_filename)
            if path.is_relative_to(PACKAGE) and code.co_name != "<module>":
                found.setdefault(path.relative_to(PACKAGE), set()).add(code.co_qualname)
        return found


def trace(directory: Path) -> Mapping[Path, set[str]]:
    """Run the demo in `directory` and return the functions that its second RL step calls, by file."""
    from strop.pipeline.run import train
    from strop.recipe.load import load_recipe
    from strop.reports.trackers import Progress

    tracer = Tracer()

    class FollowsSteps(Progress):
        stage = ""

        def stage_started(self, name: str, kind: str, total_steps: int, done_steps: int) -> None:
            self.stage = name

        def step(self, metrics: Mapping[str, float], step: int) -> None:
            if self.stage == "rl":
                tracer.is_on = step == 1

    try:
        asyncio.run(train(load_recipe(DEMO, TINY), directory, progress=FollowsSteps(), until="rl"))
    finally:
        tracer.remove()
    return tracer.functions


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        functions = trace(Path(directory) / "run")
    lines = {path: code_lines((PACKAGE / path).read_text(encoding="utf-8")) for path in sorted(functions)}
    print(f"{'code lines':>10}  {'functions':>9}  file")
    for path, num in lines.items():
        names = ", ".join(sorted(functions[path])) if "--functions" in sys.argv else ""
        print(f"{num:10}  {len(functions[path]):9}  {path}  {names}".rstrip())
    print(f"{sum(lines.values()):10}  {sum(map(len, functions.values())):9}  {len(lines)} files")


if __name__ == "__main__":
    main()
