"""A lost node of a cluster is shown while the run goes on."""

import asyncio
import contextlib
import json
import threading

from faulty_sandbox import FaultySandbox
from scripted_runs import RECIPE
from strop.cluster.placement import Node, place
from strop.pipeline import run
from strop.recipe.recipe import Recipe, resolve
from strop.reports.log import read_run
from strop.reports.trackers import Progress


class LosesNode:
    """A connection whose second node is lost, as a thread notices, when the first stage is placed."""

    directory = None

    def __init__(self):
        self.was_lost = False

    def nodes(self):
        return [Node(id=name, address=name, name=name, gpus=0, all_gpus=0) for name in ("10.0.0.1", "10.0.0.2")]

    def place(self, roles):
        fields = {"node": "10.0.0.2", "reason": "node 10.0.0.2 does not answer: timed out"}
        thread = threading.Thread(target=self.note, args=("node_lost",), kwargs=fields)
        if not self.was_lost:
            self.was_lost = True
            thread.start()
            thread.join()
        return self.placement_of(roles)

    def placement_of(self, roles):
        return place(self.nodes(), roles)


class Warnings(Progress):
    def __init__(self):
        self.seen = []

    def warning(self, text, *, stage=""):
        self.seen.append((text, threading.current_thread()))


def test_a_lost_node_is_a_warning_and_a_count_in_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "connected", lambda config, directory: contextlib.nullcontext(LosesNode()))
    recipe = Recipe.model_validate_json(json.dumps(resolve(RECIPE | {"cluster": {}})))
    progress = Warnings()
    asyncio.run(run.train(recipe, tmp_path / "run", progress=progress, until="base", runner=FaultySandbox(answer=lambda _: "")))
    text = "node 10.0.0.2 does not answer: timed out. It is not used any more."
    assert progress.seen == [(text, threading.main_thread())]
    log = read_run(run.RunDirectory(tmp_path / "run"))
    assert [warned.text for warned in log.warnings] == [text]
    assert log.losses == ("1 node",)
