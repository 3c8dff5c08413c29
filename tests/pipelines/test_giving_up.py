"""When a run that teaches nothing stops, and when it goes on. (That it stops is law 11, in tests/test_laws.py.)"""

from __future__ import annotations

import re

from scripted_runs import Watching, answer, make_recipe, run_recipe
from strop.runs import read_lines


def right(conversation, draw):
    left, plus = re.search(r"(\d+)\+(\d+)", conversation).groups()
    return answer(str(int(left) + int(plus)))


def test_a_policy_that_is_always_right_is_no_reason_to_give_up(tmp_path):
    progress = Watching()
    run_recipe(tmp_path / "run", make_recipe(steps=4, give_up_after=2), say=right, progress=progress)
    assert progress.warnings == []
    lines = [line for line in read_lines(tmp_path / "run" / "metrics.jsonl") if line["stage"] == "rl"]
    assert [(line["rollout/accuracy"], line["groups/all_right"], line["update/stuck_steps"]) for line in lines] == [
        (1.0, 3, 0)
    ] * 4
