"""`python full_disk.py DIRECTORY`: a scripted run that meets a full disk again and again; prints what became of it.

DIRECTORY lies on a small disk of its own. Each try starts when all but a few bytes are taken; then they are given back.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from scripted_runs import Watching, run_recipe, untimed
from strop.errors import RunError
from strop.run_directory import RunDirectory, read_lines

LEFT_BYTES = tuple(4096 * pages for pages in (0, 1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64))
"""Room for nothing; for some lines; for half a model; for a model and half an optimizer; and so on."""


class StageHadRoomError(Exception):
    """Ends the try, so that the next stage meets a full disk, too."""


class FillsUp(Watching):
    """Takes the disk's room when a stage starts."""

    def __init__(self, directory, stage, left_bytes):
        super().__init__()
        self.directory, self.stage, self.left_bytes = directory, stage, left_bytes

    def stage_started(self, name, kind, total_steps, done_steps):
        if name == self.stage:
            fill(self.directory / "filler", self.left_bytes)

    def stage_finished(self, name, summary):
        if name == self.stage:
            raise StageHadRoomError


def fill(path, left_bytes):
    disk = os.statvfs(path.parent)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - left_bytes)


def main(directory):
    told, lost = [], []
    run = directory / "run"
    for stage in ("base", "sft", "before", "rl"):
        for left_bytes in LEFT_BYTES:
            before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and is_kept(path)}
            try:
                run_recipe(run, progress=FillsUp(directory, stage, left_bytes), is_fresh=True)
            except RunError as error:
                told.append(str(error))
            except StageHadRoomError:
                break
            finally:
                (directory / "filler").unlink(missing_ok=True)
            lost += [str(path) for path, content in before.items() if not path.exists() or not is_whole(path, content)]
    last = run_recipe(run)
    metrics = [untimed(line) for line in read_lines(RunDirectory(run).metrics)]
    evaluations = [untimed(each) for each in last.result.evaluations]
    left = [str(path) for path in run.rglob(".*.tmp")]
    json.dump({"told": told, "lost": lost, "left": left, "metrics": metrics, "evaluations": evaluations}, sys.stdout)


def is_kept(path):
    """What a resumed run must not touch: products, evaluations, and rollouts; a timeline is of a step's last try."""
    if path.name.endswith(".timeline.json"):
        return False
    return path.name in ("manifest.json", "done.json", "result.json", "events.jsonl") or path.parent.name in (
        "model",
        "rollouts",
    )


def is_whole(path, content):
    """As it was, or longer if lines are appended to it."""
    now = path.read_bytes()
    return now.startswith(content) if path.suffix == ".jsonl" else now == content


if __name__ == "__main__":
    main(Path(sys.argv[1]))
