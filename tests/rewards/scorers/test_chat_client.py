import asyncio
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from strop.chat_client import ChatClient, ChatServiceConfig
from strop.errors import UserError
from strop.http import ServiceRefused

from .chat_service import Answer, said, serving

HELLO = [{"role": "user", "content": "hello"}]


def config(service, **keys):
    return ChatServiceConfig(url=f"{service.url}/v1", model="judge", **{"timeout_s": 20.0, "retries": 2} | keys)


def ask(settings, *asks, together=True):
    """The replies to (messages, draw) each, and how many came from the service."""

    async def run():
        client = ChatClient(settings)
        try:
            if together:
                replies = await asyncio.gather(*(client.reply(messages, draw=draw) for messages, draw in asks))
            else:
                replies = [await client.reply(messages, draw=draw) for messages, draw in asks]
            return replies, client.num_asked
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_reply_is_what_the_service_said():
    with serving(lambda asked, _: said("good day")) as service:
        [reply], _ = ask(config(service, temperature=0.5), (HELLO, 3))
    assert (reply.text, reply.finish_reason) == ("good day", "stop")
    assert service.asked[0].path == "/v1/chat/completions"
    assert service.asked[0].body == {"model": "judge", "messages": HELLO, "temperature": 0.5, "max_tokens": 1024, "seed": 3}


@pytest.mark.parametrize(
    ("apart", "ended"), [({}, "length"), ({"reasoning_content": "Hm"}, "stop"), ({"reasoning": "Hm"}, "stop")]
)
def test_a_reply_of_thoughts_alone_that_the_service_keeps_apart_says_nothing_and_is_no_fault(apart, ended):
    message = {"role": "assistant", "content": None} | apart
    thoughts = {"choices": [{"index": 0, "message": message, "finish_reason": ended}]}
    with serving(lambda *_: Answer(body=thoughts)) as service:
        [reply], num_asked = ask(config(service), (HELLO, 0))
    assert (reply.text, reply.finish_reason, num_asked) == ("", ended, 1)


def test_what_was_said_once_is_not_asked_for_again_even_at_another_address(tmp_path):
    cache = str(tmp_path / "replies")
    with serving(lambda asked, number: said(f"reply {number}")) as service:
        first, num_first = ask(config(service, cache=cache), (HELLO, 0), (HELLO, 1), together=False)
    with serving(lambda asked, _: said("another")) as moved:
        again, num_again = ask(config(moved, cache=cache), (HELLO, 0), (HELLO, 1), together=False)
        other, num_other = ask(config(moved, cache=cache, temperature=1.0), (HELLO, 0))
    assert [reply.text for reply in first] == ["reply 0", "reply 1"]
    assert again == first
    assert (num_first, num_again, num_other) == (2, 0, 1)
    assert other[0].text == "another"


def test_a_program_that_ends_in_the_middle_asks_only_for_the_rest(tmp_path):
    def answer(asked, number):
        return said("kept") if asked.body["seed"] < 3 else Answer(body={"error": "no"}, status=401)

    cache = str(tmp_path)
    with serving(answer) as service, pytest.raises(ServiceRefused):
        ask(config(service, cache=cache), *[(HELLO, draw) for draw in range(5)], together=False)
    with serving(lambda asked, _: said("kept")) as service:
        _, num_asked = ask(config(service, cache=cache), *[(HELLO, draw) for draw in range(5)])
    assert num_asked == 2


def test_a_reply_that_has_come_is_stored_although_the_client_is_closed_before_it_is_written(tmp_path):
    """The threads that write are busy when the reply comes, as on a machine with other work."""
    is_closed = threading.Event()

    async def run(settings):
        has_come = asyncio.Event()
        client = ChatClient(settings, is_kept=lambda text: has_come.set() is None)
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(max_workers=1))
        loop.run_in_executor(None, is_closed.wait)
        asking = asyncio.create_task(client.reply(HELLO))
        await has_come.wait()
        await client.close()
        is_closed.set()
        await asyncio.gather(asking, return_exceptions=True)

    with serving(lambda *_: said("kept")) as service:
        asyncio.run(run(config(service, cache=str(tmp_path))))
        [reply], num_asked = ask(config(service, cache=str(tmp_path)), (HELLO, 0))
    assert (reply.text, num_asked) == ("kept", 0)


def test_a_damaged_file_of_the_cache_is_asked_for_again(tmp_path):
    with serving(lambda asked, _: said("right")) as service:
        ask(config(service, cache=str(tmp_path)), (HELLO, 0))
        [path] = tmp_path.rglob("*.json")
        path.write_text(path.read_text()[:40])
        [reply], num_asked = ask(config(service, cache=str(tmp_path)), (HELLO, 0))
    assert (reply.text, num_asked) == ("right", 1)
    assert json.loads(path.read_text())["reply"]["text"] == "right"


def test_two_runs_that_ask_the_same_at_once_share_a_cache(tmp_path):
    async def run(settings):
        clients = [ChatClient(settings) for _ in range(4)]
        asked = [client.reply([{"role": "user", "content": str(number)}]) for number in range(6) for client in clients]
        replies = await asyncio.gather(*asked, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in clients))
        return replies

    with serving(lambda asked, _: said("x" * 100_000)) as service:
        replies = asyncio.run(run(config(service, cache=str(tmp_path), max_running=1)))
    assert [each for each in replies if isinstance(each, BaseException)] == []
    kept = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(kept) == 6
    assert {json.loads(path.read_text())["reply"]["text"] for path in kept} == {"x" * 100_000}


def test_the_same_question_in_flight_twice_is_sent_once():
    with serving(lambda asked, number: Answer(body=said(f"{number}").body, delay_s=0.05)) as service:
        replies, _ = ask(config(service), (HELLO, 0), (HELLO, 0), (HELLO, 0))
    assert {reply.text for reply in replies} == {"0"}
    assert len(service.asked) == 1


@pytest.mark.parametrize(
    "fault",
    [
        Answer(body={"error": "busy"}, status=429),
        Answer(body=b"<html>gateway</html>"),
        said(None),
        Answer(body=said("late").body, delay_s=1.5),
    ],
    ids=["429", "no JSON", "no text", "too late"],
)
def test_a_fault_that_passes_is_asked_again(fault):
    with serving(lambda asked, number: said("well") if number == 2 else fault) as service:
        [reply], _ = ask(config(service, timeout_s=0.5 if fault.delay_s else 20.0), (HELLO, 0))
    assert reply.text == "well"
    assert len(service.asked) == 3


@pytest.mark.parametrize(
    ("answer", "words", "num_asked"),
    [
        (Answer(body={"error": "bad key"}, status=401), "answered 401.*bad key.*key_env", 1),
        (Answer(body={"error": "unknown"}, status=404), "answered 404.*unknown.*called 'judge'", 1),
        (Answer(body={"error": "too long"}, status=400), "answered 400.*too long.*max_tokens = 1024.*seeded = false", 1),
        (Answer(body={"error": "no"}, status=409), "answered 409.*Another try would not change it", 1),
        (Answer(body={"error": "down"}, status=500), "answered 500.*down.*last of 3 tries", 3),
        (Answer(body=b"what?"), "without JSON: what\\?.*last of 3 tries", 3),
        (Answer(body={}, delay_s=2.0), "no answer within timeout_s = 0.2", 3),
    ],
)
def test_a_fault_that_stays_is_one_clear_error(answer, words, num_asked):
    with serving(lambda *_: answer) as service, pytest.raises(UserError, match=words):
        ask(config(service, timeout_s=0.2 if answer.delay_s else 20.0), (HELLO, 0))
    assert answer.delay_s or len(service.asked) == num_asked  # a try may end before a busy server has read it


def test_the_key_is_read_from_the_environment_and_sent(monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "s3cret")
    with serving(lambda *_: said("")) as service:
        ask(config(service, key_env="JUDGE_KEY"), (HELLO, 0))
        assert service.asked[0].key == "Bearer s3cret"
        monkeypatch.delenv("JUDGE_KEY")
        with pytest.raises(UserError, match="JUDGE_KEY is not set"):
            ask(config(service, key_env="JUDGE_KEY"), (HELLO, 0))


def test_no_more_requests_run_at_once_than_may():
    with serving(lambda *_: Answer(body=said("").body, delay_s=0.03)) as service:
        ask(config(service, max_running=3), *[(HELLO, draw) for draw in range(12)])
    assert service.most_at_once == 3


def test_a_caller_that_gives_up_loses_nothing(tmp_path):
    async def run(settings):
        client = ChatClient(settings)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.reply(HELLO), 0.05)
        await asyncio.sleep(0.4)
        reply = await client.reply(HELLO)
        await client.close()
        return reply, client.num_asked

    with serving(lambda *_: Answer(body=said("slow").body, delay_s=0.2)) as service:
        reply, num_asked = asyncio.run(run(config(service, cache=str(tmp_path))))
    assert (reply.text, num_asked) == ("slow", 1)
