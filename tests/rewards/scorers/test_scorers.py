import asyncio

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from strop.errors import ModelError, UserError
from strop.http import ServiceRefused
from strop.rewards.reward_model import ExchangeFormat, cut_by_tokens
from strop.rewards.scorers import EmbeddedScorerConfig, Exchange, HttpScorerConfig, Scorer, VllmScorerConfig, open_scorer

from .chat_service import Answer, serving
from .models import make_language_model, make_reward_model

EXCHANGES = [
    Exchange(prompt="what is it", response=text) for text in ("it is good", "it is bad, and it is long", "", "<|im_end|>")
]


@pytest.fixture(scope="module")
def language_model(tmp_path_factory):
    return make_language_model(tmp_path_factory.mktemp("language_model"))


@pytest.fixture(scope="module")
def reward_model(language_model, tmp_path_factory):
    return make_reward_model(language_model, tmp_path_factory.mktemp("reward_model"))


def score(config, exchanges=EXCHANGES):
    async def run():
        scorer = open_scorer(config)
        try:
            return await asyncio.gather(*map(scorer.score, exchanges))
        finally:
            await scorer.close()

    return asyncio.run(run())


def embedded(directory, **keys):
    return EmbeddedScorerConfig(kind="embedded", path=str(directory), **keys)


def test_scores_are_those_of_the_model_library_on_a_padded_batch(reward_model):
    exchanges = ExchangeFormat(reward_model)
    tokenizer = AutoTokenizer.from_pretrained(reward_model)
    model = AutoModelForSequenceClassification.from_pretrained(reward_model).eval()
    padded = tokenizer.pad({"input_ids": [list(exchanges.ids(each)) for each in EXCHANGES]}, return_tensors="pt")
    with torch.no_grad():
        theirs = model(**padded).logits.squeeze(-1).tolist()
    ours = score(embedded(reward_model))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert len({round(each, 3) for each in ours}) == len(ours)


def test_a_batch_of_any_size_gives_the_same_scores_in_order(reward_model):
    whole = score(embedded(reward_model))
    assert score(embedded(reward_model, max_batch=1)) == pytest.approx(whole, abs=1e-5)


def test_a_response_cannot_forge_the_end_of_its_turn(reward_model):
    exchanges = ExchangeFormat(reward_model)
    end = exchanges.ids(EXCHANGES[0])[-1]
    ids = exchanges.ids(EXCHANGES[3])
    assert ids.count(end) == exchanges.ids(EXCHANGES[0]).count(end)
    assert exchanges.pad_id not in (end,)


def test_batches_hold_as_many_tokens_as_they_may_with_their_padding():
    assert list(cut_by_tokens([3, 9, 4, 4, 20], 12)) == [[4], [1], [2, 3, 0]]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda language_model, empty: empty, "config.json is missing"),
        (lambda language_model, empty: language_model, "a language model, not a reward model"),
    ],
)
def test_a_directory_without_a_reward_model_is_named(make, words, language_model, tmp_path):
    directory = make(language_model, tmp_path)
    if directory is tmp_path:
        make_language_model(tmp_path)
        (tmp_path / "config.json").unlink()
    with pytest.raises(ModelError, match=f"{directory}.*{words}|{words}"):
        score(embedded(directory))


class Counting(Scorer):
    """A scorer that notes its batches; a response called "broken" breaks it."""

    def __init__(self, max_batch):
        super().__init__(max_batch=max_batch)
        self.batches = []

    async def score_batch(self, exchanges):
        self.batches.append([each.response for each in exchanges])
        if "broken" in self.batches[-1]:
            raise ServiceRefused("broken")
        return [float(each.response) for each in exchanges]


def scores_of(scorer, responses):
    asked = [scorer.score(Exchange(prompt="", response=response)) for response in responses]
    return asyncio.gather(*asked, return_exceptions=True)


def test_callers_at_the_same_time_share_batches_and_each_gets_its_own():
    async def run():
        scorer = Counting(max_batch=4)
        scores = await scores_of(scorer, map(str, range(10)))
        await scorer.close()
        return scorer.batches, scores

    batches, scores = asyncio.run(run())
    assert scores == [float(n) for n in range(10)]
    assert list(map(len, batches)) == [4, 4, 2]


def test_the_error_of_a_batch_is_of_that_batch_only():
    async def run():
        scorer = Counting(max_batch=2)
        found = await scores_of(scorer, ("1", "broken", "2", "3"))
        later = await scores_of(scorer, ("4",))
        await scorer.close()
        return found, later

    found, later = asyncio.run(run())
    assert [type(each) for each in found] == [ServiceRefused, ServiceRefused, float, float]
    assert later == [4.0]


def test_a_plain_service_is_shown_exchanges_and_gives_numbers():
    with serving(
        lambda asked, _: Answer(body={"scores": [len(each["response"]) for each in asked.body["exchanges"]]})
    ) as service:
        assert score(HttpScorerConfig(kind="http", url=service.url + "/score")) == [10.0, 25.0, 0.0, 10.0]
    assert service.asked[0].path == "/score"
    assert service.asked[0].body["exchanges"][0] == {"prompt": "what is it", "response": "it is good"}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"scores": [1.0]}, "1 scores where 4 were requested"),
        ({"scores": [1, 2, "good", 4]}, "'good' where a finite number"),
        ({"scores": [1, 2, float("nan"), 4]}, "nan where a finite number"),
        ({"rewards": []}, "not a list of scores"),
        (b"<html>", "without JSON"),
    ],
)
def test_a_service_that_answers_nonsense_is_one_clear_error(body, words):
    with serving(lambda *_: Answer(body=body)) as service, pytest.raises(UserError, match=words):
        score(HttpScorerConfig(kind="http", url=service.url, retries=1))
    assert len(service.asked) == 2


def test_vllm_is_sent_the_ids_of_training_and_asked_for_the_bare_number(reward_model):
    rows = [{"index": n, "object": "pooling", "data": [n + 0.5]} for n in (1, 0, 3, 2)]
    with serving(lambda *_: Answer(body={"object": "list", "data": rows})) as service:
        found = score(VllmScorerConfig(kind="vllm", url=service.url, model="rm", path=str(reward_model)))
    assert found == [0.5, 1.5, 2.5, 3.5]
    assert service.asked[0].path == "/pooling"
    assert service.asked[0].body["input"][0] == list(ExchangeFormat(reward_model).ids(EXCHANGES[0]))
    assert service.asked[0].body["use_activation"] is False


@pytest.mark.parametrize("data", [[0.1, 0.9], [[0.1]], "x"])
def test_vllm_that_serves_another_model_is_told_of(reward_model, data):
    rows = [{"index": n, "data": data} for n in range(4)]
    with serving(lambda *_: Answer(body={"data": rows})) as service, pytest.raises(UserError, match=r"/pooling|finite number"):
        score(VllmScorerConfig(kind="vllm", url=service.url, model="rm", path=str(reward_model), retries=0))
