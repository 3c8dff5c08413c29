"""A double of `strop train` that needs no time: it writes the run directory that the real one would leave behind.

The accuracy that it writes follows from the recipe: `ACCURACY_OF` its learning rate, and 0.1 more with each seed.
"""

import json
import signal
from dataclasses import dataclass, field

import typer

from strop.cli import app
from strop.recipe.load import load_recipe
from strop.run_directory import RunDirectory, read_json, write_json, write_text
from strop.runs.manifest import locked, write_manifest
from strop.stages.evaluation import Eval
from strop.stages.rl import RL

ACCURACY_OF = {1e-2: 0.5, 1e-3: 0.3, 1e-4: 0.2}


@dataclass
class FakeTrain:
    """Starts runs that make one stage each time they are looked at; those in `fails` end with an error instead."""

    fails: dict = field(default_factory=dict)  # run -> stage that it fails in
    status: int = 2  # of those that fail
    hangs: bool = False
    started: list = field(default_factory=list)
    stages: list = field(default_factory=list)  # (run, stage) in the order in which they were made
    most_at_once: int = 0
    signals: list = field(default_factory=list)
    running: set = field(default_factory=set)

    def __call__(self, command, log):
        words = command[command.index("strop.cli") + 1 :]
        train = typer.main.get_command(app).commands["train"]
        given = train.make_context("train", words[1:]).params
        recipe = load_recipe(given["recipe"], given["overrides"], name=given["name"])
        run = RunDirectory(given["runs"] / recipe.name)
        self.started.append(recipe.name)
        self.running.add(recipe.name)
        self.most_at_once = max(self.most_at_once, len(self.running))
        return FakeRun(self, recipe, run, log)


class FakeRun:
    """Makes one stage a look."""

    def __init__(self, train, recipe, run, log):
        self.train, self.recipe, self.run, self.log = train, recipe, run, log
        self.status = None

    def poll(self):
        if self.status is None and not self.train.hangs:
            self.status = self.work()
        if self.status is not None:
            self.train.running.discard(self.recipe.name)
        return self.status

    def send_signal(self, number):
        self.train.signals.append((self.recipe.name, number))
        self.status = 130 if number == signal.SIGINT else -number

    def work(self):
        """One stage; the exit status when it was the last."""
        self.run.path.mkdir(parents=True, exist_ok=True)
        with locked(self.run):
            write_manifest(self.run, self.recipe, "strop train")
            left = [name for name in self.recipe.stages if not self.run.stage(name).done.exists()]
            for name in left[:1]:
                if self.train.fails.get(self.recipe.name) == name:
                    self.log.parent.mkdir(exist_ok=True)
                    self.log.write_text("1/2 steps\nerror: stages.rl: 3 steps in a row could not learn.\n")
                    return self.train.status
                self.make(name, self.recipe.stages[name])
            if left[1:]:
                return None
            write_text(self.run.report, "<p>a report</p>")
        return 0

    def make(self, name, stage):
        self.train.stages.append((self.recipe.name, name))
        if isinstance(stage, RL):
            for step in range(1, stage.config.steps + 1):
                line = {
                    "stage": name,
                    "step": step,
                    "rollout/accuracy": 0.1 * step,
                    "rollout/tokens_per_s": 50.0,
                    "time/rollout_s": 2.0,
                    "time/step_s": 3.0 + self.recipe.seed,
                }
                self.append(self.run.metrics, line)
        self.append(self.run.events, {"stage": name, "event": "stage_finished", "time": 0.0})
        directory = self.run.stage(name)
        if isinstance(stage, Eval):
            lr = self.recipe.stages["rl"].config.trainer.optimizer.lr
            accuracy = ACCURACY_OF[lr] + 0.1 * self.recipe.seed
            result = {"stage": name, "accuracy": accuracy, "accuracy_low": accuracy - 0.1, "accuracy_high": accuracy + 0.1}
            write_json(directory.evaluation, result)
            write_json(directory.lineage, {"recipe": {"stages": {name: stage.table()}}})
        else:
            write_text(directory.model / "model.safetensors", self.recipe.name)
        write_json(directory.done, {"summary": "done", "time_s": 1.0, "model": f"stages/{name}/model"})

    def append(self, path, line):
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def made_by(run, stage):
    """The name of the run that made the model of `stage`."""
    return (run.stage(stage).model / "model.safetensors").read_text()


def figures(directory):
    return read_json(directory / "sweep.json")
