import random

import pytest
import torch

from strop.algorithms.losses import high_entropy_mask
from strop.analysis.statistics import top_entropy
from strop.evaluation.metrics import REFLECTION


def test_a_fifth_of_ten_tokens_are_the_two_highest():
    assert top_entropy([0.1, 2.0, 0.3, 0.0, 0.9, 0.2, 0.1, 0.0, 0.4, 0.5]) == {1, 4}


def test_the_number_of_marks_is_rounded_down():
    assert len(top_entropy([1.0] * 9)) == 1
    assert top_entropy([1.0] * 4) == top_entropy([]) == set()


def test_of_equal_entropies_the_first_are_marked():
    assert top_entropy([0.5, 0.7, 0.7, 0.7, 0.5], share=0.4) == {1, 2}


def test_marks_are_those_that_training_on_high_entropy_alone_would_keep():
    chance = random.Random(3)
    for length in (1, 7, 10, 33):
        entropies = [chance.choice([0.0, 0.1, 0.25, 1.5, 2.0]) for _ in range(length)]
        row = torch.tensor([entropies])
        for share in (0.2, 0.3, 1.0):
            mask = high_entropy_mask(row, torch.ones_like(row, dtype=torch.bool), share=share)
            assert top_entropy(entropies, share=share) == set(mask[0].nonzero()[:, 0].tolist())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("But before finalizing, I want to cross-verify.", ["But", "cross-verify"]),
        ("double-check it, then rerun or re-execute", ["double-check", "rerun", "re-execute"]),
        ("That call was wrong.", ["wrong"]),
        ("Everything aligns correctly", ["correctly"]),
        ("the butter, checkers, errorless awaiting: prefix", []),
        ("NameError in print_check", []),
    ],
)
def test_second_thoughts_are_whole_words(text, words):
    assert REFLECTION.findall(text) == words
