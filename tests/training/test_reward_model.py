import asyncio
import json
import math
import tracemalloc

import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM

from strop.errors import TaskError
from strop.rewards.reward_model import ExchangeFormat, head_of, last_token_scores, load_reward_model
from strop.stages.model import make_tokenizer
from strop.training.config import OptimizerConfig, TrainerConfig
from strop.training.preferences import Labelled, Pair, PreferenceRows, as_rows, read_preferences
from strop.training.reward_model import RewardTrainer, _losses, preference_loss


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("language_model")
    torch.manual_seed(0)
    tokenizer = make_tokenizer(["which word", "apple pear plum"], vocab_size=300)
    tokenizer.save_pretrained(directory)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.2,
        )
    ).save_pretrained(directory)
    return directory


def test_the_loss_of_a_pair_is_minus_the_log_of_its_sigmoid():
    margins = torch.tensor([math.log(3), 0.0, -200.0])
    # sigmoid(log 3) is 3/4, sigmoid(0) is 1/2; far on the wrong side the loss is the distance, and no infinity.
    assert preference_loss(margins).tolist() == pytest.approx([math.log(4 / 3), math.log(2), 200.0])


def test_the_loss_of_a_single_response_is_its_cross_entropy():
    scores = torch.tensor([math.log(3), math.log(3), -200.0])
    losses = [
        _losses([rows_of(4, is_good=good)], score[None])[0].item()
        for score, good in zip(scores, (True, False, False), strict=True)
    ]
    assert losses == pytest.approx([math.log(4 / 3), math.log(4), 0.0])


def test_the_gradient_of_a_pair_is_the_probability_of_the_wrong_order():
    chosen, rejected = torch.tensor([math.log(3)], requires_grad=True), torch.zeros(1, requires_grad=True)
    preference_loss(chosen - rejected).sum().backward()
    assert (chosen.grad.item(), rejected.grad.item()) == pytest.approx((-0.25, 0.25))


def rows_of(*lengths, is_good=True):
    return PreferenceRows(rows=tuple(tuple(range(5, 5 + length)) for length in lengths), num_prompt_ids=3, is_good=is_good)


PAIRS = [rows_of(9, 4), rows_of(5, 12), rows_of(3, 3), rows_of(20, 6)]


def trained(language_model, preferences, *, updates=2, **keys):
    """Weights and reports after some updates."""

    async def run():
        config = TrainerConfig(optimizer=OptimizerConfig(lr=0.01), **keys)
        trainer = RewardTrainer(language_model, config, total_updates=None)
        try:
            reports = [await trainer.update(preferences) for _ in range(updates)]
            return {name: trainer._weights.whole(name).clone() for name in trainer._weights.names()}, reports
        finally:
            await trainer.close()

    return asyncio.run(run())


def test_the_first_loss_is_that_of_a_head_at_zero(language_model):
    _, [report] = trained(language_model, PAIRS, updates=1)
    assert report.loss == pytest.approx(math.log(2))
    assert report.statistics == pytest.approx({"accuracy": 0.5, "margin": 0.0, "score": 0.0})


def test_an_update_tells_what_it_cost(language_model):
    _, [report] = trained(language_model, PAIRS[:2], updates=1)
    assert report.cost.tokens == 9 + 4 + 5 + 12
    layers = 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 64)  # q and o, k and v, the MLP; twice
    pairs = 45 + 10 + 15 + 78  # tokens that see each other
    assert report.cost.flops == 2 * 3 * (30 * layers + 4 * 32 + 2 * 2 * 32 * pairs)
    assert report.cost.time_s > 0


@pytest.mark.parametrize("preferences", [PAIRS, [rows_of(9), rows_of(4, is_good=False), rows_of(12, is_good=False)]])
def test_the_update_does_not_depend_on_how_it_is_cut(language_model, preferences):
    whole, reports = trained(language_model, preferences)
    cut, cut_reports = trained(language_model, preferences, max_tokens_per_microbatch=1)
    assert [each.loss for each in cut_reports] == pytest.approx([each.loss for each in reports], abs=1e-6)
    for statistic in ("margin", "score"):  # a margin near 0 may change its sign, and the accuracy with it
        assert cut_reports[1].statistics[statistic] == pytest.approx(reports[1].statistics[statistic], abs=1e-5)
    for name, tensor in whole.items():
        assert torch.allclose(cut[name], tensor, atol=2e-4), name


def test_updates_put_the_chosen_above_the_rejected(language_model):
    _, reports = trained(language_model, PAIRS[:2], updates=12)
    assert reports[-1].statistics["accuracy"] == 1.0
    assert reports[-1].loss < 0.5 * reports[0].loss


def test_a_resumed_trainer_ends_with_the_same_weights(language_model, tmp_path):
    config = TrainerConfig(optimizer=OptimizerConfig(lr=0.01))

    async def run(break_after):
        trainer = RewardTrainer(language_model, config, total_updates=None)
        for number in range(4):
            if number == break_after:
                write = await trainer.snapshot()
                await trainer.update(PAIRS)  # what comes after the copy is not in it
                write(tmp_path / "checkpoint")
                await trainer.close()
                trainer = RewardTrainer(language_model, config, total_updates=None)
                await trainer.load(tmp_path / "checkpoint")
            await trainer.update(PAIRS)
        scores = await trainer.score([row for each in PAIRS for row in each.rows])
        await trainer.close()
        return scores

    assert asyncio.run(run(2)) == asyncio.run(run(None))


def test_the_saved_directory_gives_the_same_scores_in_transformers(language_model, tmp_path):
    async def run():
        trainer = RewardTrainer(language_model, TrainerConfig(optimizer=OptimizerConfig(lr=0.01)), total_updates=None)
        for _ in range(3):
            await trainer.update(PAIRS)
        scores = await trainer.score([row for each in PAIRS for row in each.rows])
        await trainer.save_model(tmp_path)
        await trainer.close()
        return scores

    scores = asyncio.run(run())
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    assert theirs.config.num_labels == 1
    with torch.no_grad():
        found = [theirs(input_ids=torch.tensor([row])).logits.item() for each in PAIRS for row in each.rows]
        ours = last_token_scores(load_reward_model(tmp_path), [row for each in PAIRS for row in each.rows]).tolist()
    assert found == pytest.approx(scores, abs=1e-5)
    assert ours == pytest.approx(scores, abs=1e-5)
    assert head_of(load_reward_model(tmp_path)).abs().max() > 0


def write(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_pairs_and_single_responses_are_read(tmp_path):
    pair = {"prompt": "q", "chosen": "a", "rejected": "b", "source": "ours"}
    single = {"prompt": "q", "response": "a", "label": "unsafe"}
    assert list(read_preferences(write(tmp_path / "p.jsonl", pair))) == [Pair(prompt="q", chosen="a", rejected="b")]
    assert list(read_preferences(write(tmp_path / "s.jsonl", single))) == [Labelled(prompt="q", response="a", is_good=False)]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"prompt": "q", "chosen": "a"}], r"p\.jsonl:1: rejected is missing; the row has chosen, prompt"),
        ([{"prompt": "q", "chosen": "a", "rejected": 3}], r"p\.jsonl:1: rejected is '3'"),
        ([{"prompt": "q", "response": "a", "label": "good"}], r"p\.jsonl:1: label is 'good'"),
        ([{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "response": "a", "label": True}], "Make two files"),
        ([["q", "a", "b"]], r"p\.jsonl:1: a JSON list, not an object"),
        ([], "it has no rows"),
    ],
)
def test_rows_that_are_no_preferences_are_named(tmp_path, rows, words):
    with pytest.raises(TaskError, match=words):
        read_preferences(write(tmp_path / "p.jsonl", *rows))


def test_preferences_are_read_when_they_are_asked_for(tmp_path):
    pairs = [{"prompt": f"q{number}", "chosen": "a" * 2000, "rejected": "b"} for number in range(2000)]
    path = write(tmp_path / "p.jsonl", pairs[0])
    path.write_text(path.read_text() + "\n  \n" + "".join(json.dumps(pair) + "\n" for pair in pairs[1:]))
    read_preferences(path)  # what is imported for it does not count
    tracemalloc.start()
    found = read_preferences(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 0.1 * path.stat().st_size
    assert [each.prompt for each in found] == [f"q{number}" for number in range(2000)]
    assert found[1999] == Pair(**pairs[1999])
    with pytest.raises(IndexError):
        found[2000]


def test_a_file_in_another_encoding_is_named(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes('{"prompt": "é", "chosen": "a", "rejected": "b"}\n'.encode("latin-1"))
    with pytest.raises(TaskError, match=r"p\.jsonl:1: not UTF-8: .* Each line must be one JSON object, in UTF-8"):
        read_preferences(path)


def test_the_helpful_model_reads_summaries_and_the_safety_model_whole_responses(language_model):
    exchanges = ExchangeFormat(language_model)
    pair = Pair(prompt="which word", chosen="<think>pear?</think>apple", rejected="plum")

    def read(judged_on, **keys):
        [found] = as_rows([pair], exchanges, judged_on=judged_on, think_tag="think", **{"max_length": 100} | keys)
        return found and exchanges.tokenizer.decode(found.rows[0])

    assert "pear" not in read("summary")
    assert "apple" in read("summary")
    assert "<think>pear?</think>apple" in read("response")
    assert read("response", max_length=8) is None


def test_dialogues_of_one_turn_are_pairs_and_those_of_several_are_left_out_and_counted(tmp_path, caplog):
    asked = "\n\nHuman: What is 1+1?\n\nAssistant:"
    rows = [
        {"chosen": f"{asked} It is 2.", "rejected": f"{asked} I do not know."},
        {
            "chosen": f"{asked} It is 2.\n\nHuman: Sure?\n\nAssistant: Yes.",
            "rejected": f"{asked} It is 2.\n\nHuman: Sure?\n\nAssistant: No.",
        },
        {"chosen": f"{asked} 2", "rejected": f"{asked} 3\n\nHuman: No."},
        {"chosen": f"{asked} 2", "rejected": "\n\nHuman: And 1+2?\n\nAssistant: 3"},
        {"chosen": f"{asked} 2", "rejected": f"{asked} "},
    ]
    found = list(read_preferences(write(tmp_path / "hh.jsonl", *rows)))
    assert found == [Pair(prompt="What is 1+1?", chosen="It is 2.", rejected="I do not know.")]
    assert "hh.jsonl: 4 dialogues that are not one question with two answers are left out." in caplog.text
