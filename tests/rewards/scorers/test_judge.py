import asyncio
import random
import re

import pytest
from pydantic import ValidationError

from strop.errors import UserError
from strop.rewards.scorers import ChatServiceConfig, Exchange, JudgeConfig, ModelJudge
from strop.rewards.scorers.chat_client import Reply
from strop.rewards.scorers.unclear import Unclear

from .chat_service import Answer, said, serving

GOOD, BAD = "It is 4, for 2 and 2 make 4.", "It is 5."


def judging(service, *, tries=2, **keys):
    chat = ChatServiceConfig(url=service.url, model="judge", backoff_s=0.01)
    return JudgeConfig(service=chat, tries=tries, **keys)


def ask(config, *calls):
    async def run():
        judge = ModelJudge(config)
        try:
            return [await call(judge) for call in calls]
        finally:
            await judge.close()

    return asyncio.run(run())


def prefers_good(asked, _):
    """A judge that knows which is better, wherever it stands."""
    text = asked.body["messages"][0]["content"]
    return said(f"Let me see [[A=B]]... no: [[{'A>>B' if text.index(GOOD) < text.index(BAD) else 'B>>A'}]]")


def test_the_verdict_is_of_the_responses_and_not_of_their_places():
    with serving(prefers_good) as service:
        calls = [lambda judge, n=n: judge.compare("2+2?", GOOD, BAD, judgement=n) for n in range(8)]
        assert ask(judging(service), *calls) == [2.0] * 8
    places = {text.index(GOOD) < text.index(BAD) for text in (asked.body["messages"][0]["content"] for asked in service.asked)}
    assert places == {True, False}


def test_a_judge_that_always_takes_the_first_prefers_neither():
    with serving(lambda *_: said("[[A>B]]")) as service:
        calls = [lambda judge, n=n: judge.compare("2+2?", GOOD, BAD, judgement=n) for n in range(32)]
        values = ask(judging(service), *calls)
    assert set(values) == {1.0, -1.0}
    assert abs(sum(values)) <= 16


@pytest.mark.parametrize("verdict", ["A>>B", "A>B", "A=B", "B>A", "B>>A"])
def test_a_verdict_counts_whichever_way_round_it_is_written(verdict):
    turned = verdict[-1] + verdict[1:-1].replace(">", "<") + verdict[0]
    calls = [lambda judge: judge.compare("2+2?", GOOD, BAD)]
    found = []
    for written in (verdict, turned):
        with serving(lambda *_, written=written: said(f"[[{written}]]")) as service:
            found += ask(judging(service), *calls)
    assert None not in found
    assert found[0] == found[1]


@pytest.mark.parametrize(("text", "value"), [("fine [[7]]", 7.0), ("[[3]] rather [[8.5]]", 8.5), ("[[9/10]]", 9.0)])
def test_the_last_number_in_brackets_is_the_score(text, value):
    with serving(lambda *_: said(text)) as service:
        assert ask(judging(service), lambda judge: judge.score(Exchange(prompt="2+2?", response=GOOD))) == [value]
    assert GOOD in service.asked[0].body["messages"][0]["content"]


@pytest.mark.parametrize("text", ["seven", "[[11]]", "[[0]]", "7", ""])
def test_a_reply_without_a_score_is_asked_for_again_as_another_draw(text):
    with serving(lambda _, number: said("[[4]]" if number else text)) as service:
        assert ask(judging(service), lambda judge: judge.score(Exchange(prompt="2+2?", response=GOOD))) == [4.0]
    assert [asked.body["seed"] for asked in service.asked] == [0, 1]


def test_a_response_that_confuses_the_judge_for_good_has_no_score_and_the_others_have():
    def answer(asked, _):
        return said("what?" if "zzz" in asked.body["messages"][0]["content"] else "[[5]]")

    calls = [lambda judge, r=r: judge.score(Exchange(prompt="2+2?", response=r)) for r in ["a", *["zzz"] * 20, "b"]]
    with serving(answer) as service:
        assert ask(judging(service), *calls) == [5.0, *[None] * 20, 5.0]


def test_a_judge_that_talks_nonsense_from_the_start_is_told_of():
    with serving(lambda *_: said("I like turtles")) as service, pytest.raises(UserError, match=r"'judge'.*no verdict.*turtles"):
        ask(judging(service), *scores(*DIFFERENT))
    assert len(service.asked) == 16


def scores(*exchanges):
    return [lambda judge, p=p, r=r: judge.score(Exchange(prompt=p, response=r)) for p, r in exchanges]


class Scripted:
    """A client whose model answers `says` (the question and the reply's number -> text, seconds), to `max_running` at once."""

    def __init__(self, says, max_running=1):
        self.num_asked = 0
        self._says, self._running = says, asyncio.Semaphore(max_running)

    async def reply(self, messages, *, draw=0):
        async with self._running:
            text, after_s = self._says(messages[0]["content"], self.num_asked)
            self.num_asked += 1
            await asyncio.sleep(after_s)
        return Reply(text=text, finish_reason="stop", num_prompt_tokens=0, num_completion_tokens=0)

    async def close(self):
        pass


def ask_at_once(config, *calls, client=None):
    async def run():
        judge = ModelJudge(config, client)
        try:
            return await asyncio.gather(*(call(judge) for call in calls))
        finally:
            await judge.close()

    return asyncio.run(run())


SERVED_NOWHERE = JudgeConfig(service=ChatServiceConfig(url="http://nowhere", model="judge"), tries=3)
DIFFERENT = [(f"{n}+{n}?", str(n)) for n in range(40)]
MANY = [(f"request {n // 8}", f"response <{n}>") for n in range(256)]


CONFUSING = {response for number, (_, response) in enumerate(MANY) if number * 7 % 10 == 3}  # one in ten


def confused_by(responses):
    return lambda asked, _: said(
        "what?" if any(each in asked.body["messages"][0]["content"] for each in responses) else "[[5]]"
    )


def test_one_response_in_ten_confuses_a_judge_that_128_ask_at_once_and_they_go_on():
    with serving(confused_by(CONFUSING)) as service:
        values = ask_at_once(judging(service, tries=3), *scores(*MANY[:128]))
    assert values == [None if response in CONFUSING else 5.0 for _, response in MANY[:128]]
    assert len(service.asked) == 128 + 2 * values.count(None)  # their retries came last
    assert values.count(None) > 8


@pytest.mark.parametrize(("clear_s", "unclear_s"), [(0.001, 0.001), (0.02, 0.0), (0.0, 0.02)])
@pytest.mark.parametrize("max_running", [16, 256])
def test_whichever_replies_take_long_what_confuses_a_judge_now_and_then_is_not_in_a_row(max_running, clear_s, unclear_s):
    def says(asked, _):
        return ("what?", unclear_s) if any(each in asked for each in CONFUSING) else ("[[5]]", clear_s)

    values = ask_at_once(SERVED_NOWHERE, *scores(*MANY), client=Scripted(says, max_running))
    assert values == [None if response in CONFUSING else 5.0 for _, response in MANY]


@pytest.mark.parametrize("num_clear", [0, 50])
def test_a_judge_that_turns_to_nonsense_while_256_ask_at_once_is_told_of_after_a_few(num_clear):
    draw = random.Random(0)
    client = Scripted(lambda _, number: ("[[5]]" if number < num_clear else "bla", draw.choice([0.001, 0.004, 0.02])), 16)
    with pytest.raises(UserError, match=r"different responses in a row, in 3 replies each") as raised:
        ask_at_once(SERVED_NOWHERE, *scores(*MANY), client=client)
    unclear, num = map(int, re.search(r"\((\d+) of (\d+) judgements so far hold none\)", str(raised.value)).groups())
    assert num - unclear == num_clear
    assert 8 <= unclear <= 64  # of 206 or 256


@pytest.mark.parametrize("first", [[], [("2+2?", "4")]])
def test_one_request_alone_is_blamed_for_127_responses_by_a_judge_clear_before_or_not(first):
    def says(asked, _):
        return "what?" if "zzz?" in asked else "[[5]]", 0.0

    asked = [*first, *(("zzz?", f"<{n}>") for n in range(128))]
    values = ask_at_once(SERVED_NOWHERE, *scores(*asked[:-1]), client=Scripted(says))
    assert values == [5.0] * len(first) + [None] * 127
    with pytest.raises(UserError, match="no verdict on 128 different responses in a row"):
        ask_at_once(SERVED_NOWHERE, *scores(*asked), client=Scripted(says))


def test_a_request_that_confuses_a_judge_counts_as_four_beside_others_that_do():
    confusing = [("zzz?", f"<{n}>") for n in range(16)]
    beside = [(f"zzz {n}?", "<1>") for n in range(4)]
    with serving(confused_by({"zzz"})) as service:
        assert ask(judging(service, tries=1), *scores(*confusing, *beside[:3])) == [None] * 19
        with pytest.raises(UserError, match="no verdict on 20 different responses in a row"):
            ask(judging(service, tries=1), *scores(*confusing, *beside))


def test_two_responses_shown_in_either_order_count_once():
    calls = [
        lambda judge, n=n, a=a, b=b: judge.compare_as_shown(f"{n}?", a, b)
        for n in range(8)
        for a, b in ((GOOD, BAD), (BAD, GOOD))
    ]
    with serving(lambda *_: said("what?")) as service:
        assert ask(judging(service, tries=1), *calls[:14]) == [None] * 14
        with pytest.raises(UserError, match="no verdict on 8 different responses in a row"):
            ask(judging(service, tries=1), *calls)


def unclear_one(unclear, number):
    unclear.add(number, judged=number, about=str(number), replies=["bla"], is_cut_off=False)
    unclear.end(number)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_what_is_still_being_asked_interrupts_a_row_and_what_was_given_up_does_not(is_given_up):
    unclear = Unclear("the judge")
    numbers = [unclear.begin() for _ in range(9)]
    if is_given_up:
        unclear.end(numbers[4])
    for number in (*numbers[:4], *reversed(numbers[6:])):
        unclear_one(unclear, number)
    if is_given_up:
        with pytest.raises(UserError, match="on 8 different responses in a row"):
            unclear_one(unclear, numbers[5])
        return
    unclear_one(unclear, numbers[5])
    with pytest.raises(UserError, match="on 9 different responses in a row"):
        unclear_one(unclear, numbers[4])


def test_what_is_remembered_of_a_long_run_does_not_grow():
    unclear = Unclear("the judge")
    for _ in range(5000):
        unclear_one(unclear, unclear.begin())
        clear = unclear.begin()
        unclear.clear(clear)
        unclear.end(clear)
    assert len(unclear._rows._by_first) == len(unclear._rows._by_last) == 1024
    assert not unclear._rows._open


def test_a_judge_that_turns_to_nonsense_is_told_of_with_its_name_address_and_last_words(caplog):
    with serving(lambda _, number: said("[[5]]" if number < 3 else "bla bla")) as service:
        with pytest.raises(UserError) as raised:
            ask(judging(service), *scores(*DIFFERENT))
        assert len(service.asked) == 3 + 8 * 2
        name = f"the judge 'judge' at {service.url} gave no verdict"
    assert f"{name} on 8 different responses in a row, in 2 replies each (8 of 11 judgements so far hold none)" in str(
        raised.value
    )
    assert "the last reply ends with 'bla bla'" in str(raised.value)
    warned = [record.getMessage() for record in caplog.records if "no verdict" in record.getMessage()]
    assert [text.partition(" judgements")[0] for text in warned] == ["1 of 4", "2 of 5", "4 of 7"]
    assert all(f"{name} in 2 replies; the last reply ends with 'bla bla'" in text for text in warned)


def test_seven_in_a_row_are_not_yet_the_fault_of_the_judge():
    confusing = {f"{n}+{n}?" for n in range(40) if n % 8}

    def answer(asked, _):
        return said("what?" if any(each in asked.body["messages"][0]["content"] for each in confusing) else "[[5]]")

    with serving(answer) as service:
        values = ask(judging(service, tries=1), *scores(*((f" {prompt}", response) for prompt, response in DIFFERENT)))
    assert values == [None if n % 8 else 5.0 for n in range(40)]


def test_a_request_that_confuses_a_judge_with_all_of_its_responses_is_not_the_judges_fault():
    def answer(asked, _):
        return said("what?" if "zzz?" in asked.body["messages"][0]["content"] else "[[5]]")

    asked = [("2+2?", "4"), *(("zzz?", str(n)) for n in range(20)), ("3+3?", "6")]
    with serving(answer) as service:
        assert ask(judging(service, tries=1), *scores(*asked)) == [5.0, *[None] * 20, 5.0]


def test_nonsense_that_ended_a_run_is_not_kept_so_the_same_calls_go_on_when_the_judge_is_mended(tmp_path):
    with serving(lambda _, number: said("[[5]]" if number < 3 else "bla bla")) as service:
        config = judging(service)
        config = config.model_copy(update={"service": config.service.model_copy(update={"cache": str(tmp_path)})})
        with pytest.raises(UserError, match="in a row"):
            ask(config, *scores(*DIFFERENT))
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 3
    with serving(lambda *_: said("[[6]]")) as service:
        moved = config.model_copy(update={"service": config.service.model_copy(update={"url": service.url})})
        assert ask(moved, *scores(*DIFFERENT)) == [5.0] * 3 + [6.0] * 37
        assert len(service.asked) == 37


def test_a_reply_that_was_cut_off_before_its_verdict_is_told_as_such(caplog):
    with serving(lambda *_: said("On the one hand", "length")) as service:
        assert ask(judging(service), *scores(("2+2?", "4"))) == [None]
    assert "the last reply, cut off at service.max_tokens, ends with 'On the one hand'" in caplog.text


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"score_prompt": "How good is it?"}, r"nowhere says \$response"),
        ({"score_prompt": "$response $reponse"}, r"\$reponse is nothing"),
        ({"pair_prompt": "$a or what?"}, r"nowhere says \$b"),
        ({"lowest": 5.0, "highest": 5.0}, "highest is 5 and lowest is 5"),
    ],
)
def test_a_prompt_that_shows_nothing_is_refused(keys, words):
    with pytest.raises(ValidationError, match=words):
        JudgeConfig(service=ChatServiceConfig(url="http://x", model="m"), **keys)


def test_a_response_that_the_service_refuses_to_look_at_has_no_score_and_the_others_have(caplog):
    def answer(asked, _):
        is_long = "zzz" in asked.body["messages"][0]["content"]
        return Answer(body={"error": "maximum context length"}, status=400) if is_long else said("[[5]]")

    calls = [lambda judge, r=r: judge.score(Exchange(prompt="2+2?", response=r)) for r in ["a", *["zzz"] * 20, "b"]]
    with serving(answer) as service:
        assert ask(judging(service), *calls) == [5.0, *[None] * 20, 5.0]
    assert len(service.asked) == 22  # what is refused is not asked for again
    assert "16 so far not judged" in caplog.text


def test_a_service_that_refuses_every_judgement_is_told_of():
    calls = [lambda judge, n=n: judge.score(Exchange(prompt="2+2?", response=str(n))) for n in range(9)]
    refused = Answer(body={"error": "seed is no key"}, status=400)
    with (
        serving(lambda *_: refused) as service,
        pytest.raises(UserError, match=r"answered 400.*no key.*seeded = false"),
    ):
        ask(judging(service), *calls)
    assert len(service.asked) == 8


def test_a_service_that_refuses_every_judgement_after_its_first_ones_is_told_of():
    def answer(_, number):
        return said("[[5]]") if number < 3 else Answer(body={"error": "maximum context length"}, status=400)

    calls = [lambda judge, n=n: judge.score(Exchange(prompt=f"{n:02}+2?", response="4")) for n in range(20)]
    with serving(answer) as service, pytest.raises(UserError, match=r"8 different responses in a row.*maximum context length"):
        ask(judging(service), *calls)
    assert len(service.asked) == 3 + 8
