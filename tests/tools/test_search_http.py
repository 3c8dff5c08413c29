"""Search over HTTP against a real server: how it is asked, what is read of its answer, and what happens when it fails."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import httpx2
import pytest
from pydantic import ValidationError
from web_server import Answer, Asked, WebServer, serving

from strop import http
from strop.deadline import deadline
from strop.errors import ToolBroken, UserError
from strop.http import ServiceRefused
from strop.sandbox import ScriptedSandbox
from strop.tools import ToolResult
from strop.tools.search import Origin, ResultFile, read_results
from strop.tools.search.http import HttpConfig
from strop.tools.search.tool import Search, SearchTool
from strop.types import ToolOutcome

_ResultT = TypeVar("_ResultT")

FOUND = {"results": [{"title": "Oslo", "text": "A city\nin Norway."}, {"text": "untitled"}, {"title": "no text"}]}
FAST = {"kind": "http", "timeout_s": 5.0, "params": {"q": "{query}"}}


def ask(config: dict[str, Any], *queries: str, top_k: int = 3) -> list[ToolResult]:
    return asyncio.run(with_tool(config, lambda tool: gather(tool, queries), top_k=top_k))


async def gather(tool: SearchTool, queries: Sequence[str]) -> list[ToolResult]:
    return [await tool.call({"query": query}, seed=0) for query in queries]


async def was_asked(server: WebServer) -> None:
    while not server.asked:  # noqa: ASYNC110 - its thread has no loop
        await asyncio.sleep(0.01)


async def with_tool(
    backend: dict[str, Any], use: Callable[[SearchTool], Awaitable[_ResultT]], *, top_k: int = 3, **config: Any
) -> _ResultT:
    async with AsyncExitStack() as stack:
        kind = Search(top_k=top_k, backend=backend, **config)
        (tool,) = await kind.open(stack, ScriptedSandbox(answer={}), key="tools.search")
        assert isinstance(tool, SearchTool)
        return await use(tool)


def test_any_service_is_described_by_its_request_and_by_where_its_results_stand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "s3cret")
    with serving(lambda asked, number: Answer(body={"web": {"hits": [{"page": {"name": "T"}, "lines": "x"}]}})) as server:
        config = {
            "kind": "http",
            "url": server.url + "/find/{query_in_url}",
            "method": "POST",
            "params": {"n": "{top_k}"},
            "headers": {"Authorization": "Bearer {key}"},
            "body": {"question": "{query}", "limit": "{top_k}", "deep": [True, "k={top_k}"]},
            "key_env": "MY_KEY",
            "results": "web.hits",
            "title": "page.name",
            "text": "lines",
        }
        [result] = ask(config, "a {key} & b", top_k=7)
    [asked] = server.asked
    assert (result.outcome, result.text) == (ToolOutcome.STDOUT, "Page 1: T: x")
    assert (asked.method, asked.path, asked.params) == ("POST", "/find/a%20%7Bkey%7D%20%26%20b", {"n": "7"})
    assert asked.body == {"question": "a {key} & b", "limit": 7, "deep": [True, "k=7"]}
    assert asked.headers["authorization"] == "Bearer s3cret"


def test_results_without_text_are_left_out_and_no_more_are_shown_than_were_asked_for() -> None:
    with serving(lambda asked, number: Answer(body=FOUND)) as server:
        [all_of_them] = ask({**FAST, "url": server.url}, "oslo")
        [one] = ask({**FAST, "url": server.url}, "oslo", top_k=1)
    assert all_of_them.text == "Page 1: Oslo: A city in Norway.\nPage 2: untitled"
    assert one.text == "Page 1: Oslo: A city in Norway."


def test_of_a_long_result_the_head_is_kept_and_the_others_are_whole() -> None:
    long = {"results": [{"title": "Oslo", "text": "a" * 50}, {"text": "b"}]}
    with serving(lambda asked, number: Answer(body=long)) as server:
        cut = with_tool({**FAST, "url": server.url}, lambda tool: gather(tool, ["oslo"]), max_result_chars=20)
        [result] = asyncio.run(cut)
    assert result.text == "Page 1: Oslo: aaaaaa\nPage 2: b"


@pytest.mark.parametrize(
    ("config", "answer", "sent"),
    [
        (
            {"kind": "serper"},
            {"organic": [{"title": "T", "snippet": "S", "link": "L"}]},
            ("POST", {}, {"q": "oslo", "num": 3, "hl": "en"}, "x-api-key"),
        ),
        (
            {"kind": "brightdata", "zone": "z", "country": "no"},
            {"organic": [{"title": "T", "description": "S", "rank": 1}]},
            (
                "POST",
                {},
                {
                    "zone": "z",
                    "url": "https://www.bing.com/search?q=oslo&mkt=en-US&setLang=en&brd_json=1&cc=no",
                    "format": "raw",
                },
                "authorization",
            ),
        ),
        (
            {"kind": "retriever"},
            {"result": [[{"document": {"id": "1", "contents": "T: S"}, "score": 1.5}]]},
            ("POST", {}, {"queries": ["oslo"], "topk": 3, "return_scores": True}, None),
        ),
    ],
    ids=["serper", "brightdata", "retriever"],
)
def test_known_services_are_asked_in_their_own_way(
    config: dict[str, Any], answer: Any, sent: tuple[str, dict[str, str], Any, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SERPER_API_KEY", "k")
    monkeypatch.setenv("BRIGHTDATA_API_KEY", "k")
    with serving(lambda asked, number: Answer(body=answer)) as server:
        [result] = ask({**config, "url": f"{server.url}/search"}, "oslo")
    [asked] = server.asked
    method, params, body, key_header = sent
    assert result.text == "Page 1: T: S"
    assert (asked.method, asked.path, asked.params, asked.body) == (method, "/search", params, body)
    assert key_header is None or asked.headers[key_header].removeprefix("Bearer ") == "k"


@pytest.mark.parametrize(
    ("key", "value", "kind", "owner"),
    [
        ("method", "GET", "serper", "http"),
        ("results", "hits", "brightdata", "http"),
        ("params", {"q": "{query}"}, "retriever", "http"),
        ("zone", "z", "serper", "brightdata"),
        ("country", "no", "http", "brightdata"),
    ],
)
def test_a_key_of_another_service_is_refused(key: str, value: Any, kind: str, owner: str) -> None:
    with pytest.raises(ValidationError, match=f"{key} is a key of kind = '{owner}', not of kind = '{kind}'. Remove it."):
        HttpConfig.model_validate({"kind": kind, "url": "http://a", key: value})
    for known in ("http", "serper", "brightdata", "retriever"):
        config = HttpConfig.model_validate({"kind": known, "url": "http://a"})
        assert HttpConfig.model_validate(config.model_dump()) == config


def test_saved_results_may_have_blank_lines_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "saved.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"query": "a", "results": "A"}\n\n  \n{"query": "b", "results": "B"}\n\n{"query": "c')
    assert read_results(path) == {"a": "A", "b": "B"}
    path.write_bytes(b'\xef\xbb\xbf{"query": "a", "results": "A"}')
    assert read_results(path) == {"a": "A"}
    for line in ("[1]", "{", '{"query": "a"}'):
        path.write_text(f"\n{line}\n")
        with pytest.raises(UserError, match=r'saved\.jsonl:2: not \{"query": \.\.\., "results": \.\.\.\}'):
            read_results(path)


@pytest.mark.parametrize(
    ("query", "language", "market"),
    [
        ("甄嬛传导演", "zh", "zh-CN"),
        ("東京タワーの高さ", "ja", "ja-JP"),
        ("서울 인구", "ko", "ko-KR"),
        ("высота Эльбруса", "ru", "ru-RU"),
        ("hauteur du Mont Blanc", "en", "en-US"),
    ],
)
def test_results_are_asked_for_in_the_language_of_the_query(query: str, language: str, market: str) -> None:
    with serving(lambda asked, number: Answer(body=FOUND)) as server:
        ask({**FAST, "url": server.url, "params": {"hl": "{language}", "mkt": "{market}"}}, query)
    assert server.asked[0].params == {"hl": language, "mkt": market}


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_a_service_that_is_gone_or_refuses_the_key_ends_the_run_with_a_remedy(status: int) -> None:
    with serving(lambda asked, number: Answer(body={"error": "gone"}, status=status)) as server:
        with pytest.raises(UserError, match=rf"the search service is not usable: \S+ answered {status}: .*gone.*(key|address)"):
            ask({**FAST, "url": server.url}, "oslo")
        assert len(server.asked) == 1


def test_a_resolver_that_cannot_tell_is_a_fault_of_the_network() -> None:
    def failed(number: int) -> ServiceRefused:
        error = httpx2.ConnectError("no")
        error.__cause__ = socket.gaierror(number, "said")
        return ServiceRefused("", is_unknown_host=http.is_unknown_host(error))

    assert failed(socket.EAI_NONAME).is_of_the_service
    assert not failed(socket.EAI_AGAIN).is_of_the_service


def test_a_server_whose_name_has_no_address_ends_the_run() -> None:
    config = {**FAST, "url": "http://no-such-host.invalid/search", "retries": 1}
    with pytest.raises(UserError, match=r"cannot be reached .*of 2 tries\. Is the address right, and is there a network"):
        ask(config, "oslo")


def test_a_key_that_is_not_set_is_told_before_anything_is_played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERPER_API_KEY", raising=False)
    with pytest.raises(UserError, match="the environment variable SERPER_API_KEY is not set"):
        ask({"kind": "serper"})


@pytest.mark.parametrize(
    "fault",
    [
        Answer(body={}, status=503),
        Answer(body=b"<html>"),
        Answer(body=None),
        Answer(body={}, delay_s=1.5),
    ],
    ids=["503", "no JSON", "hung up", "late"],
)
def test_a_fault_of_the_service_is_tried_again_and_the_policy_does_not_see_it(fault: Answer) -> None:
    with serving(lambda asked, number: fault if number < 2 else Answer(body=FOUND)) as server:
        [result] = ask({**FAST, "url": server.url, "timeout_s": 0.7 if fault.delay_s else 5.0}, "oslo")
    assert result.outcome is ToolOutcome.STDOUT
    assert len(server.asked) == 3


def test_a_service_that_keeps_failing_breaks_the_tool_and_says_how() -> None:
    with serving(lambda asked, number: Answer(body={"error": "out of\nmemory"}, status=500)) as server:
        with pytest.raises(ToolBroken, match=r"search: \S+ answered 500: .*out of.*the last of 3 tries"):
            ask({**FAST, "url": server.url, "retries": 2}, "oslo")
        assert len(server.asked) == 3


def test_pauses_double_and_the_service_may_ask_for_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BACKOFF_S", 0.1)

    def busy(asked: Asked, number: int) -> Answer:
        return Answer(body={}, status=503, headers={"Retry-After": "1"} if number == 2 else {})

    with serving(busy) as server, pytest.raises(ToolBroken):
        ask({**FAST, "url": server.url, "retries": 3}, "oslo")
    first, second, third = (after.time - before.time for before, after in zip(server.asked, server.asked[1:], strict=False))
    assert first >= 0.075
    assert second >= 0.15
    assert third >= 1.0


def test_a_query_that_the_service_refuses_is_told_to_the_policy() -> None:
    with serving(lambda asked, number: Answer(body={"error": "too long"}, status=422)) as server:
        [result] = ask({**FAST, "url": server.url}, "x" * 100)
    assert result.outcome is ToolOutcome.REJECTED
    assert "too long" in result.text


def test_nothing_found_is_no_error_and_an_empty_query_is() -> None:
    with serving(lambda asked, number: Answer(body={"results": []})) as server:
        nothing, empty = ask({**FAST, "url": server.url}, "oslo", " ")
    assert (nothing.outcome, nothing.text) == (ToolOutcome.EMPTY, "No search results found.")
    assert empty.outcome is ToolOutcome.WRONG_ARGUMENTS
    assert len(server.asked) == 1


def test_an_answer_of_another_shape_breaks_the_tool() -> None:
    odd = Answer(body={"results": "none"})
    with serving(lambda asked, number: odd) as server, pytest.raises(ToolBroken, match="without a list at 'results'"):
        ask({**FAST, "url": server.url}, "oslo")


def test_what_was_found_is_kept_and_not_asked_for_again_not_even_by_another_run(tmp_path: Path) -> None:
    cache = tmp_path / "deep" / "search.jsonl"
    with serving(lambda asked, number: Answer(body=FOUND)) as server:
        config = {**FAST, "url": server.url, "cache": str(cache)}
        texts = [result.text for result in ask(config, "oslo", "oslo", "rome")]
    assert texts[0] == texts[1]
    assert [asked.params["q"] for asked in server.asked] == ["oslo", "rome"]
    assert [result.text for result in ask(config, "oslo")] == texts[:1]  # the server is gone
    assert ask({"kind": "kept", "path": str(cache)}, "Rome!")[0].text == texts[2]


def test_half_a_surrogate_pair_in_a_result_is_escaped_before_it_is_kept(tmp_path: Path) -> None:
    cache = tmp_path / "search.jsonl"
    with serving(lambda asked, number: Answer(body=b'{"results": [{"text": "a \\ud83d b"}]}')) as server:
        config = {**FAST, "url": server.url, "cache": str(cache)}
        assert [result.text for result in ask(config, "oslo")] == ["Page 1: a \\ud83d b"]
    assert ask({"kind": "kept", "path": str(cache)}, "oslo")[0].text == "Page 1: a \\ud83d b"


def test_what_was_kept_answers_the_service_and_the_number_of_results_that_it_was_kept_for(tmp_path: Path) -> None:
    cache = tmp_path / "search.jsonl"
    cache.write_text('{"query": "old", "results": "Page 1: of an earlier version"}\n')
    with serving(lambda asked, number: Answer(body=FOUND)) as server:
        config = {**FAST, "url": f"{server.url}/find?key=s3cret", "cache": str(cache)}
        of_three, of_one = (ask(config, "oslo", top_k=top_k)[0].text for top_k in (3, 1))
        assert (of_three.count("Page"), of_one.count("Page")) == (2, 1)
        ask({**config, "url": f"{server.url}/other"}, "oslo")
        ask({**config, "params": {"q": "{query}", "deep": "yes"}}, "oslo")
        assert len(server.asked) == 4
        assert [ask(config, "oslo", top_k=top_k)[0].text for top_k in (3, 1)] == [of_three, of_one]
        assert [ask(config, "old", top_k=top_k)[0].text for top_k in (3, 1)] == ["Page 1: of an earlier version"] * 2
    assert len(server.asked) == 4
    lines = [json.loads(line) for line in cache.read_text().splitlines()]
    assert [(line.get("top_k"), "service" in line) for line in lines] == [(None, False)] + [(3, True), (1, True)] + 2 * [
        (3, True)
    ]
    assert "s3cret" not in cache.read_text()
    cache.write_text('{"query": "old", "results": "Page 1", "service": "x", "top_k": "3"}\n')
    with pytest.raises(UserError, match=r"(?s):1: .*top_k"):
        ResultFile(cache)


def test_equal_queries_at_once_are_one_request_that_outlives_whoever_asked_first() -> None:
    with serving(lambda asked, number: Answer(body=FOUND, delay_s=1.0)) as server:

        async def ask_at_once(tool: SearchTool) -> list[ToolResult]:
            first = asyncio.ensure_future(tool.call({"query": "oslo"}, seed=0))
            await was_asked(server)

            async def join() -> ToolResult:
                async with deadline(0.2):  # which waiting for another's request is not counted against
                    return await tool.call({"query": "oslo"}, seed=0)

            others = asyncio.gather(*(join() for _ in range(7)))
            await asyncio.sleep(0.05)
            first.cancel()
            return await others

        results = asyncio.run(with_tool({**FAST, "url": server.url}, ask_at_once))
        assert [result.outcome for result in results] == [ToolOutcome.STDOUT] * 7
        assert len(server.asked) == 1


def test_a_fault_is_not_kept(tmp_path: Path) -> None:
    cache = tmp_path / "search.jsonl"
    with serving(lambda asked, number: Answer(body={}, status=500)) as server, pytest.raises(ToolBroken):
        ask({**FAST, "url": server.url, "cache": str(cache), "retries": 0}, "oslo")
    assert not cache.exists()


def test_many_writers_may_add_to_one_file_and_it_stays_whole(tmp_path: Path) -> None:
    files = [ResultFile(tmp_path / "results.jsonl") for _ in range(3)]

    async def add() -> None:
        asked = [file.add(f"q{i}-{place}", "é\n", Origin("s", 3)) for place, file in enumerate(files) for i in range(10)]
        await asyncio.gather(*asked)

    asyncio.run(add())
    assert len(read_results(tmp_path / "results.jsonl")) == 30


def test_a_line_whose_writer_was_killed_is_left_out_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    asyncio.run(ResultFile(path).add("a", "1", Origin("s", 3)))
    with path.open("a") as file:
        file.write('{"query": "b", "resu')
    assert read_results(path) == {"a": "1"}
    asyncio.run(ResultFile(path).add("c", "3", Origin("s", 3)))
    assert read_results(path) == {"a": "1", "c": "3"}
    path.write_text('{"query": "b", "resu\n{"query": "c", "results": "3"}\n')
    with pytest.raises(UserError, match=":1: not"):
        ResultFile(path)


def test_kept_results_answer_a_query_that_differs_in_case_space_and_punctuation(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(json.dumps({"search query: Who was  Ibn Rushd?": "Page 1: a", "oslo": "Page 1: b"}))
    backend = {"kind": "kept", "path": str(path)}
    told = [(result.outcome, result.text) for result in ask(backend, "who was ibn rushd", "Oslo", "Rome")]
    assert told[:2] == [(ToolOutcome.STDOUT, "Page 1: a"), (ToolOutcome.STDOUT, "Page 1: b")]
    assert told[2][0] is ToolOutcome.EMPTY
    for wrong in ("nowhere.json", "kept.txt"):
        with pytest.raises(UserError, match=wrong):
            ask({"kind": "kept", "path": str(tmp_path / wrong)})
