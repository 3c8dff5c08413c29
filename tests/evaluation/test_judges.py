import json

import pytest
from attempts import attempt, boxed

from strop.errors import TaskError
from strop.evaluation.short_answers import exact_match, f1, right_letter, right_names
from strop.types import Task

TITAN = {"references": json.dumps(["Titan IIIE", "the Titan 3E rocket"])}


def task(answer, **facts):
    return Task(id="7", question="?", answer=answer, source="by hand", facts=facts)


@pytest.mark.parametrize(
    ("said", "em", "overlap"),
    [
        ("Titan IIIE", 1.0, 1.0),
        ("titan iiie.", 1.0, 1.0),
        ("Titan 3E rocket", 1.0, 1.0),  # the second reference, without its article
        ("Titan", 0.0, 2 / 3),  # precision 1, recall 1/2
        ("Saturn V", 0.0, 0.0),
    ],
)
def test_short_answers_are_judged_against_the_best_reference(said, em, overlap):
    trajectory = attempt(boxed(said), right=False).trajectory
    assert exact_match(task("Titan IIIE", **TITAN), trajectory) == em
    assert f1(task("Titan IIIE", **TITAN), trajectory) == pytest.approx(overlap)


def test_without_references_the_answer_is_the_reference_and_no_answer_earns_nothing():
    assert exact_match(task("yes"), attempt("<answer>Yes</answer>", right=False).trajectory) == 1.0
    silent = attempt("I do not know", right=False).trajectory
    assert (exact_match(task("yes"), silent), f1(task("yes"), silent)) == (0.0, 0.0)


def test_references_that_are_no_list_name_the_task():
    with pytest.raises(TaskError, match="task '7' of by hand: its fact 'references' is 'James', not a JSON list"):
        f1(task("James", references="James"), attempt(boxed("James"), right=False).trajectory)


@pytest.mark.parametrize(
    ("said", "is_right"),
    [
        ("Ada, Ben", True),
        ("ben and Ada.", True),
        ("\\text{Ada, Ben}", True),
        ("Ada", False),
        ("Ada, Ben, Cleo", False),
        ("Ada and Ben are knights", False),
        ("none", False),
    ],
)
def test_names_are_right_in_any_order_and_with_nothing_else(said, is_right):
    assert right_names(task("Ada, Ben"), attempt(boxed(said), right=False).trajectory) == is_right
    assert right_names(task("none"), attempt(boxed("None."), right=False).trajectory) == 1.0
    assert right_names(task("none"), attempt("I do not know", right=False).trajectory) == 0.0


@pytest.mark.parametrize("said", ["C", "(C)", "c.", "\\text{C}", "Option C", "The answer is (C)", "答案：C。", "选（C）"])
def test_a_choice_is_right_by_its_letter(said):
    assert right_letter(task("C"), attempt(boxed(said), right=False).trajectory) == 1.0


@pytest.mark.parametrize("said", ["B", "B or C", "carbon", ""])
def test_another_letter_two_letters_and_a_word_are_wrong(said):
    assert right_letter(task("C"), attempt(boxed(said), right=False).trajectory) == 0.0
