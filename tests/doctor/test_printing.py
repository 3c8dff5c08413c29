"""The mark before each check: a tick says that it was made, and that all is well."""

import io
from dataclasses import replace

from rich.console import Console

from strop.doctor.finding import Diagnosis, Finding, print_diagnosis


def printed(diagnosis):
    told = io.StringIO()
    print_diagnosis(diagnosis, Console(file=told, width=128))
    return told.getvalue()


def test_only_a_check_that_was_made_has_a_tick():
    findings = (
        Finding(check="loss mask", detail="trains on what was sampled"),
        Finding(check="tool round trip", detail="not made: the prompt tells of no tools", is_made=False),
        Finding(check="reward", detail="known answers are misjudged.", remedy="Mend it."),
    )
    told = printed(Diagnosis(subject="a recipe", findings=findings, not_made=("publication",), rollout=()))
    assert [line.rstrip().split(maxsplit=1) for line in told.splitlines() if line[2:3] in ("✓", "✗", "-")] == [
        ["✓", "loss mask        trains on what was sampled"],
        ["-", "tool round trip  not made: the prompt tells of no tools"],
        ["✗", "reward           known answers are misjudged."],
        ["-", "publication      not checked"],
    ]
    assert "1 problem found." in told


def test_what_a_recipe_gives_no_check_to_do_has_no_tick(examine_with):
    lines = printed(examine_with(lambda parts: replace(parts, tools=()))).splitlines()
    marks = {line.split()[1]: line.split()[0] for line in lines if line.startswith(("  ✓", "  -", "  ✗"))}
    assert marks["tool"] == "-"
    assert set(marks.values()) == {"✓", "-"}
