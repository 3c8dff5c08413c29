import pytest
import torch

from strop.algorithms.method import LossInputs
from strop.cs336.supplement import PackedSFTDataset
from strop.training.sft import Demonstration, Segment, cut_into_rows, pack_demonstrations, sft_token_loss


def test_only_a_demonstrators_turns_are_imitated():
    talk = Demonstration(
        segments=(
            Segment(ids=(1, 2), is_demonstrator=False),
            Segment(ids=(3, 4), is_demonstrator=True),
            Segment(ids=(5,), is_demonstrator=False),
            Segment(ids=(6,), is_demonstrator=True),
        )
    )
    batch = pack_demonstrations([talk, Demonstration(segments=(Segment(ids=(7, 8), is_demonstrator=True),))])
    assert batch.ids.tolist() == [[1, 2, 3, 4, 5, 6], [7, 8, 0, 0, 0, 0]]
    # The 7 is the demonstrator's too, but nothing comes before it that could predict it.
    assert batch.loss_mask.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0]]
    assert batch.loss_weights[batch.loss_mask].tolist() == [0.25] * 4
    assert batch.advantages[batch.loss_mask].tolist() == [1.0] * 4


def test_the_loss_of_sft_is_minus_the_logprob():
    logprobs = torch.tensor([-0.5, -3.0, -2.0])
    mask = torch.tensor([True, True, False])
    inputs = LossInputs(
        loss_mask=mask, advantages=torch.ones(3), sampled_logprobs=torch.zeros(3), entropies=torch.zeros(3), columns={}
    )
    assert sft_token_loss(logprobs, inputs).tolist() == [0.5, 3.0, 0.0]


def test_rows_of_one_length_are_those_of_cs336s_packed_data():
    """Its rows, their labels, and the mean over all labels; the ids are cut within demonstrations and the tail is dropped."""
    documents = [range(1, 6), range(6, 16), range(16, 24)]
    demonstrations = [
        Demonstration(
            segments=(Segment(ids=tuple(ids[:2]), is_demonstrator=False), Segment(ids=tuple(ids[2:]), is_demonstrator=True))
        )
        for ids in documents
    ]
    rows, expected = list(cut_into_rows(demonstrations, 4)), PackedSFTDataset(torch.arange(1, 24), 4)
    batch = pack_demonstrations(rows)
    assert batch.ids.tolist() == [
        [1, 2, 3, 4, 5],
        [5, 6, 7, 8, 9],
        [9, 10, 11, 12, 13],
        [13, 14, 15, 16, 17],
        [17, 18, 19, 20, 21],
    ]
    assert batch.ids[:, :-1].tolist() == [row["input_ids"].tolist() for row in expected]
    assert batch.ids[:, 1:].tolist() == [row["labels"].tolist() for row in expected]
    assert batch.loss_weights.tolist() == [[0.0, *[pytest.approx(1 / 20)] * 4]] * 5


def test_a_demonstration_of_nothing_is_refused():
    with pytest.raises(ValueError, match="demonstration 0 has no ids"):
        pack_demonstrations([Demonstration(segments=())])
