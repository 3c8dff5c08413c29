"""The cases of experiments/grader.py: spellings mean the same, near misses do not, and the graders tell them apart."""

import asyncio
import importlib.util
import random
import sys
import tomllib
from pathlib import Path

import pytest

from strop.pipeline.sweep_file import load_sweep
from strop.recipe.load import load_recipe
from strop.rewards import MathReward, SumReward
from strop.rewards.countdown import CountdownReward
from strop.rewards.form import F1Part
from strop.rewards.math import MathPart
from strop.rewards.r1_zero import R1ZeroPart
from strop.rewards.sum import FunctionPart, FunctionReward

RECIPES = Path(__file__).resolve().parents[2] / "recipes"
PATH = Path(__file__).resolve().parents[2] / "experiments" / "grader.py"
sys.path.insert(0, str(PATH.parent))
SPEC = importlib.util.spec_from_file_location("grader_experiment", PATH)
grader = sys.modules[SPEC.name] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(grader)

TEXTS = (
    "1,080",
    "-7",
    "0.25",
    r"-\frac{3}{8}",
    r"2\sqrt{5}",
    r"(1,-2)",
    r"\text{north}",
    "31_5",
    r"45^\circ",
    r"10 \text{ cm}",
)
LABELS = [grader.Label(source="by hand", row=row, text=text) for row, text in enumerate(TEXTS)]


def test_every_label_has_at_least_five_spellings_that_differ():
    for label in LABELS:
        assert len(set(grader.spellings(label).values())) >= 6, label  # the label as it is among them


def test_near_misses_are_of_every_kind_and_none_of_them_is_the_label():
    cases = list(grader.near_misses(LABELS[0], LABELS, random.Random(0)))
    answers = {case.kind: case.answer for case in cases}
    assert {"one more": "1081", "one less": "1079", "other sign": "-1080", "ten times": "10800"}.items() <= answers.items()
    assert answers["digits swapped"] == "1800"  # 0180 is no way to write a number
    assert {"another row's label", "label in the reasoning", "label first of two boxes", "label last of two boxes"} <= set(
        answers
    )
    assert not any(case.is_right for case in cases)


LENIENT_LABELS, PLAIN_LABELS = LABELS[:4], LABELS[:2]


@pytest.mark.parametrize("which", grader.LENIENT)
def test_the_graders_by_math_verify_misjudge_nothing_of_this(which):
    report = judged(which, LENIENT_LABELS)
    assert report["misjudged"] == []
    assert report["near_misses"]["num"] > 30
    assert report["right_answers"]["num"] > 40
    assert report["accepted_by_rule"]["num"] == 0


@pytest.mark.parametrize(
    ("which", "by_rule"),
    [
        ("math, exact", []),
        ("r1_zero, fast", ["label last of two boxes"]),
        ("r1_zero", ["label last of two boxes"]),
        ("question_only, fast", ["label last of two boxes", "label without an answer tag"]),
        ("question_only", ["label last of two boxes", "label without an answer tag"]),
    ],
)
def test_the_other_graders_accept_no_near_miss_but_those_of_their_rules(which, by_rule):
    report = judged(which, LENIENT_LABELS)
    assert report["near_misses"]["misjudged"] == 0
    assert report["near_misses"]["num"] > 25
    assert report["accepted_by_rule"]["by_kind"] == {kind: [4, 4] for kind in by_rule}  # all of them, one of each label


@pytest.mark.parametrize(
    ("which", "rejected"),
    [
        ("math, exact", {"unit", "unit in words", "equation", "displaystyle"}),
        ("r1_zero, fast", set()),
        ("question_only, fast", set()),
    ],
)
def test_an_integer_as_a_fraction_is_neither_a_plain_number_nor_an_integer_to_the_courses_grader(which, rejected):
    report = judged(which, PLAIN_LABELS)
    fractions = {"plain fraction", "not reduced", "dfrac", "spaces in braces"}
    assert {each["kind"] for each in report["misjudged"]} == fractions | rejected
    assert report["right_answers"]["by_kind"]["spaced commas"] == [1, 0]


def judged(which, labels):
    cases = grader.make_cases(labels, seed=0)
    return grader.summarise(cases, asyncio.run(grader.judge(cases, grader.GRADERS[which])), grader.GRADERS[which].accepts)


@pytest.mark.parametrize(
    ("which", "spelling"),
    [
        (
            "arpo, a word in common",
            {"18.00": False, "18 dollars": True, "x = 18": True, r"\$18": True, "18.": True, "36/2": False},
        ),
        (
            "arpo, the same words",
            {"18.00": False, "18 dollars": False, "x = 18": False, r"\$18": True, "18.": True, "36/2": False},
        ),
    ],
)
def test_arpos_grader_compares_words_without_their_punctuation(which, spelling):
    label = grader.Label(source="by hand", row=0, text="18")
    cases = [grader.Case(label=label, kind="by hand", answer=answer, is_right=True) for answer in spelling]
    assert dict(zip(spelling, asyncio.run(grader.judge(cases, grader.GRADERS[which])), strict=True)) == spelling


SEES_NO_LABEL = {  # parts of a sum that judge form, length, language or a preference, whatever the answer is
    *("r1_zero_format", "question_only_format", "format", "turns_format", "tag_count", "code_format", "language"),
    *("repetition", "soft_overlong", "cosine", "length", "called", "reasoning_steps", "scorer", "judge"),
}
NOT_MEASURED = {  # settings of graders that no label of GSM8K or MATH-500 can be put to, and why
    ("countdown", True): "there is no label: whatever has the target's value is right (test_countdown_reward.py)",
    ("function", "strop.evaluation.short_answers:right_letter"): "labels are letters (evaluation/test_judges.py)",
    ("function", "strop.evaluation.short_answers:exact_match"): "labels are names and phrases (evaluation/test_judges.py)",
    ("function", "strop.evaluation.short_answers:right_names"): "labels are lists of names (evaluation/test_judges.py)",
    ("function", "strop.cs336.supplement:mmlu_right"): "labels are letters (evaluation/test_eval_recipes.py)",
    ("function", "strop.cs336.supplement:mmlu_letter"): "it reads the form (evaluation/test_eval_recipes.py)",
    ("function", "strop.cs336.supplement:gsm8k_right"): "the last number counts (cs336/test_cs336_supplement.py)",
    ("function", "strop.cs336.supplement:gsm8k_number"): "it reads the form (evaluation/test_eval_recipes.py)",
    (
        "math",
        "answer_tag",
        False,
        "exact",
    ): "labels are whole numbers of a generator (test_sum.py)",
    ("math", "response", True, "fused"): "the same judge is measured on a box within an answer tag",
    ("code",): "there is no label: a program is run on tests (test_code.py)",
    ("function", "strop.evaluation.short_answers:f1"): "likewise, and it has no weight; arpo's F1 is measured",
}


def test_every_grader_of_a_shipped_recipe_is_measured_or_said_not_to_be():
    measured = {settings for each in grader.GRADERS.values() for settings in settings_of(each.reward)}
    used = {}
    for path in sorted(RECIPES.rglob("*.toml")):
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
        if "recipe" in tree:  # a sweep
            recipes = [next(iter(arm.recipes.values())) for arm in load_sweep(path).arms]
        else:
            recipes = [load_recipe(path)] if "stages" in tree else []  # no curation
        for stage in (stage for recipe in recipes for stage in recipe.stages.values()):
            for settings in settings_of(getattr(stage.config, "reward", None)):
                used.setdefault(settings, path.name)
    assert ("r1_zero", True, "dr_grpo") in used  # CS336's default
    assert ("question_only", True, "strop") in used  # DAPO
    assert ("math", "answer_tag", True, "exact") in used  # two-tools
    assert ("arpo",) in used
    assert {settings: path for settings, path in used.items() if settings not in measured | set(NOT_MEASURED)} == {}
    assert set(NOT_MEASURED) <= set(used) - measured  # none of them is out of date


def settings_of(reward):
    """What decides how a reward judges answers, of each of its parts that does; what is not known here has its kind alone."""
    parts = list(reward.parts.values()) if isinstance(reward, SumReward) else [] if reward is None else [reward]
    for part in parts:
        match part:
            case MathReward():
                yield ("math", "answer_tag", part.config.needs_box, part.config.judge)
            case MathPart():
                yield ("math", part.config.answer_in, part.config.needs_box, part.config.judge)
            case R1ZeroPart():
                yield (part.kind, part.config.fast, part.config.judge)
            case F1Part():
                yield ("arpo",)
            case CountdownReward():
                yield ("countdown", part.config.needs_box)
            case FunctionReward() | FunctionPart():
                yield ("function", part.config.function)
            case _ if part.kind not in SEES_NO_LABEL:
                yield (part.kind,)
