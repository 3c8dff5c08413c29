import gzip
import json
import math

import pytest
import torch
from tiny import BOS, EOS, UNKNOWN, VOCABULARY, A, B, C, log_table, word_tokenizer

from strop.cs336 import (
    compute_per_instance_dpo_loss,
    get_packed_sft_dataset,
    iterate_batches,
    load_prompt,
    parse_gsm8k_response,
    parse_mmlu_response,
)
from strop.cs336.supplement import PackedSFTDataset
from strop.errors import TaskError

HEAD, BETWEEN = load_prompt("alpaca_sft").split("{response}")[0].split("{instruction}")


def in_alpaca(prompt, response, *, bos=(BOS,)):
    """Most words of the template are unknown to the tokenizer of `tiny`."""
    words = f"{HEAD} {prompt} {BETWEEN} {response}".split()
    return [*bos, *(VOCABULARY.get(word, UNKNOWN) for word in words), EOS]


def write(path, *pairs):
    lines = "".join(json.dumps({"prompt": prompt, "response": response}) + "\n" for prompt, response in pairs)
    path.write_bytes(gzip.compress(lines.encode()) if path.suffix == ".gz" else lines.encode())
    return path


@pytest.mark.parametrize("name", ["pairs.jsonl", "pairs.jsonl.gz"])
def test_documents_are_packed_across_rows_and_the_tail_is_dropped(tmp_path, name):
    path = write(tmp_path / name, ("a b", "c"), ("d", "a"))
    stream = in_alpaca("a b", "c") + in_alpaca("d", "a")
    length = 7
    dataset = get_packed_sft_dataset(word_tokenizer(), path, length, shuffle=False)
    assert len(dataset) == (len(stream) - 1) // length
    for index in range(len(dataset)):
        start = index * length
        assert dataset[index]["input_ids"].tolist() == stream[start : start + length]
        assert dataset[index]["labels"].tolist() == stream[start + 1 : start + 1 + length]
        assert dataset[index]["labels"].dtype == torch.int64
    assert len(list(dataset)) == len(dataset)


def test_a_tokenizer_without_bos_begins_documents_without_it(tmp_path):
    path = write(tmp_path / "pairs.jsonl", ("a", "b"), ("a", "b"))
    stream = 2 * in_alpaca("a", "b", bos=())
    dataset = get_packed_sft_dataset(word_tokenizer(adds_bos=False), path, len(stream) - 1, shuffle=False)
    assert dataset[0]["input_ids"].tolist() == stream[:-1]


@pytest.mark.parametrize(("num_ids", "rows"), [(0, 0), (1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_a_row_needs_a_label_for_its_last_token(num_ids, rows):
    assert len(PackedSFTDataset(torch.arange(num_ids), 4)) == rows


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"}', "pairs.jsonl:3: not an object with the texts 'prompt' and 'response'"),
        ('{"prompt": "a", "response": null}', "pairs.jsonl:3: not an object with the texts"),
        ("[1]", "pairs.jsonl:3: not an object with the texts"),
        ('{"prompt": "a"', "pairs.jsonl:3: not valid JSON"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path, line, said):
    path = write(tmp_path / "pairs.jsonl", ("a", "b"))
    path.write_text(path.read_text() + "\n" + line + "\n")
    with pytest.raises(TaskError, match=said):
        get_packed_sft_dataset(word_tokenizer(), path, 4, shuffle=False)


def test_pairs_that_do_not_fill_a_row_are_refused_with_the_numbers(tmp_path):
    path = write(tmp_path / "pairs.jsonl", ("a", "b"))
    num = len(in_alpaca("a", "b"))
    assert len(get_packed_sft_dataset(word_tokenizer(), path, num - 1, shuffle=False)) == 1
    with pytest.raises(TaskError, match=f"1 pairs make {num} tokens, and a row of seq_length = {num} takes one more"):
        get_packed_sft_dataset(word_tokenizer(), path, num, shuffle=False)
    with pytest.raises(ValueError, match="seq_length is 0"):
        get_packed_sft_dataset(word_tokenizer(), path, 0, shuffle=False)


def test_shuffling_reorders_whole_documents(tmp_path):
    path = write(tmp_path / "pairs.jsonl", *[("a", word) for word in "abcd" * 5])
    length = len(in_alpaca("a", "a"))
    orders = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        dataset = get_packed_sft_dataset(word_tokenizer(), path, length, shuffle=True)
        orders.append([row["input_ids"][-2].item() for row in dataset])
    plain = get_packed_sft_dataset(word_tokenizer(), path, length, shuffle=False)
    assert orders[0] == orders[1] != orders[2]
    assert orders[0] != [row["input_ids"][-2].item() for row in plain]


def test_batches_are_one_epoch():
    dataset = PackedSFTDataset(torch.arange(21), 4)
    batches = list(iterate_batches(dataset, 2, shuffle=False))
    assert [batch["input_ids"].shape for batch in batches] == [(2, 4), (2, 4), (1, 4)]
    assert batches[0]["labels"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 8]]
    torch.manual_seed(0)
    shuffled = torch.cat([batch["input_ids"] for batch in iterate_batches(dataset, 2, shuffle=True)])
    assert shuffled.flatten().tolist() != list(range(20))
    assert sorted(shuffled.flatten().tolist()) == list(range(20))


def policy_and_reference():
    """The reference finds every word equally likely; the policy, behind an unknown word, `b` thrice as likely as any other."""
    rows = [[1 / 8] * 8 for _ in range(8)]
    likes_b = [0.1] * 8
    likes_b[B] = 0.3
    return log_table([*rows[:3], likes_b, *rows[4:]]), log_table(rows)


def test_the_dpo_loss_compares_how_much_likelier_each_response_became():
    policy, reference = policy_and_reference()
    for chosen, rejected, log_odds in (("b", "c", math.log(3)), ("c", "b", -math.log(3)), ("b", "b", 0.0)):
        loss = compute_per_instance_dpo_loss(policy, reference, word_tokenizer(), 0.5, "a", chosen, rejected)
        # What follows the response is equally likely under both; the prompt is the same twice.
        assert loss.item() == pytest.approx(math.log(1 + math.exp(-0.5 * log_odds)), abs=1e-6)
        assert loss.shape == ()


def test_the_dpo_loss_ends_a_response_with_eos_and_spares_the_reference():
    rows = [[1 / 8] * 8 for _ in range(8)]
    ends_after_c = [[0.1, 0.1, 0.3, *[0.1] * 5] if word == C else row for word, row in enumerate(rows)]
    policy, reference = log_table(ends_after_c), log_table(rows)
    loss = compute_per_instance_dpo_loss(policy, reference, word_tokenizer(), 1.0, "b", "c", "d")
    # log π/π_ref is log(0.3 * 8) for EOS behind c, and 0 everywhere else.
    assert loss.item() == pytest.approx(math.log(1 + 1 / 2.4), abs=1e-6)
    loss.backward()
    assert policy.logits.grad[C].abs().sum() > 0
    assert policy.logits.grad[A].abs().sum() == 0
    assert reference.logits.grad is None


VIROLOGY = {"subject": "virology", "question": "How many?", "options": ["100", "1", "10", "unknown"], "answer": "A"}


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("The correct answer is B. There is only one known at present, the BK virus.", "B"),
        ("The correct answer is 10000 polyomaviruses.", None),
        ("The answer is (C).", "C"),
        ("Answer: **D**", "D"),
        ("the answer is option A", "A"),
        ("The correct answer is A\n\nQ: Which? The correct answer is B.", "A"),
        ("The correct answer is: C", "C"),
        ("B", "B"),
        (" (D) because", "D"),
        ("The correct answer is `B`.", "B"),
        ("`C`", "C"),
        ("C. None of the others", "C"),
        ("The answer is Bacteria.", None),
        ("The answer is E.", None),  # there are four options
        ("A virus is small, so I think it is the last.", None),
        ("Because of D", None),
        ("", None),
    ],
)
def test_the_letter_of_an_mmlu_answer(output, letter):
    assert parse_mmlu_response(VIROLOGY, output) == letter


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("Natalia sold 48/2 = 24 clips in May, and 48+24 = 72 clips altogether.", "72"),
        ("Natalia sold seventy-two clips.", None),
        ("She earns $1,234.50.", "1234.50"),
        ("#### 12,345,678", "12345678"),
        ("It fell to -5", "-5"),
        ("He owes -$12.", "-12"),
        ("It fell to \u22125 degrees.", "-5"),
        ("10\u22123", "3"),
        ("10-3", "3"),
        ("(4)-3", "3"),
        ("It is .5", ".5"),
        ("1, 2", "2"),
        ("The answer is 18.", "18"),
        ("", None),
        ("He has 5 - 3", "3"),  # a difference
        ("So:\n- 12 eggs\n- 18", "18"),  # a list
        ("- $18", "18"),
        ("So:\n-18", "-18"),
        ("[4]-3", "3"),
        ("gone--18 of them", "18"),
        ("answer: 1 000", "1000"),
        ("answer: 12 345 000.50", "12345000.50"),
        ("answer: 1\u202f234", "1234"),
        ("\\$1{,}234 or 1\\,234", "1234"),
        ("of 10 200 300", "300"),  # what a space divides may be several
        ("The price is 5e3", "5e3"),
        ("1.5E-3.", "1.5E-3"),
        ("5 eggs, 3e", "3"),
        ("Python 1.5.2", None),
        ("All 18 of them on 12.03.2024.", "18"),
        ("5...10", "10"),
        ("That is all.5", "5"),
    ],
)
def test_the_last_number_of_a_gsm8k_answer(output, number):
    assert parse_gsm8k_response(output) == number
