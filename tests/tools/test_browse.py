"""The browse tool against a real server with pages and a PDF."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, TypeVar

import pytest
from web_server import Answer, Asked, serving

from rewards.scorers import chat_service
from strop.errors import ToolBroken, UserError
from strop.sandbox import ScriptedSandbox
from strop.tools import browse as browse_module
from strop.tools.browse import Browse, BrowseTool, passage
from strop.tools.protocol import ToolResult
from strop.types import ToolOutcome

_ResultT = TypeVar("_ResultT")
HTML = {"Content-Type": "text/html; charset=utf-8"}
HEADLESS = "<html><head><title>T</title><svg><p>x</p><body><p>Hello world</p></html>"  # neither head nor svg is closed
PAGE = "<html><head><title>T</title></head><h1>Öslo</h1><script>bad()</script><p>A city\n in <b>Norway</b>.</p></html>"


def pdf(text: str) -> bytes:
    """A PDF of one page that says `text`."""
    content = f"BT /F1 24 Tf 72 700 Td ({text}) Tj ET".encode()
    objects = [
        b"<< /Type /Catalog /Pages 2 0 R >>",
        b"<< /Type /Pages /Kids [3 0 R] /Count 1 >>",
        b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents 4 0 R /Resources << /Font << /F1 5 0 R >> >> >>",
        b"<< /Length %d >>\nstream\n%s\nendstream" % (len(content), content),
        b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>",
    ]
    out, places = bytearray(b"%PDF-1.4\n"), []
    for number, body in enumerate(objects, start=1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, body)
    start = len(out)
    out += b"xref\n0 6\n0000000000 65535 f \n" + b"".join(b"%010d 00000 n \n" % place for place in places)
    return bytes(out) + b"trailer << /Size 6 /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % start


def answers(asked: Asked, number: int) -> Answer:
    return {
        "/page": Answer(body=PAGE.encode(), headers=HTML),
        "/paper": Answer(body=pdf("The tower is 330 m high."), headers={"Content-Type": "application/pdf"}),
        "/headless": Answer(body=HEADLESS.encode(), headers={"Content-Type": "Text/HTML"}),
        "/away": Answer(body=b"", status=302, headers={"Location": "http://[::1"}),
        "/plain": Answer(body=b"just text", headers={"Content-Type": "text/plain"}),
        "/moved": Answer(body=b"", status=302, headers={"Location": "/page"}),
        "/loop": Answer(body=b"", status=302, headers={"Location": "/loop"}),
        "/damaged": Answer(body=b"%PDF-1.4 no", headers={"Content-Type": "application/pdf"}),
        "/image": Answer(body=b"\x89PNG", headers={"Content-Type": "image/png"}),
        "/late": Answer(body=b"late", delay_s=2.0),
        "/empty": Answer(body=b"<html></html>", headers=HTML),
    }.get(asked.path, Answer(body=b"", status=404))


def with_tool(use: Callable[[BrowseTool], Awaitable[_ResultT]], **config: Any) -> _ResultT:
    async def run() -> _ResultT:
        async with AsyncExitStack() as stack:
            kind = Browse(**{"allow_private": True} | config)
            (tool,) = await kind.open(stack, ScriptedSandbox(answer={}), key="tools.browse")
            assert isinstance(tool, BrowseTool)
            return await use(tool)

    return asyncio.run(run())


def browse(url: str, query: str = "Norway", **config: Any) -> ToolResult:
    return with_tool(lambda tool: tool.call({"url": url, "query": query}, seed=0), **config)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/page", "Öslo\nA city\nin Norway."),
        ("/moved", "Öslo\nA city\nin Norway."),
        ("/paper", "The tower is 330 m high."),
        ("/plain", "just text"),
        ("/headless", "Hello world"),
    ],
)
def test_pages_and_pdfs_become_text(path: str, text: str) -> None:
    with serving(answers) as server:
        found = browse(server.url + path)
    assert (found.outcome, " ".join(found.text.split())) == (ToolOutcome.STDOUT, " ".join(text.split()))


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/gone", "status 404"),
        ("/loop", "more than 5 redirections"),
        ("/away", "redirects to 'http://[::1', which is no address"),
        ("/damaged", "its PDF is damaged"),
        ("/image", "image/png, which has no text"),
        ("/late", "it took more than 1 s"),
    ],
)
def test_what_cannot_be_read_is_told_to_the_policy(path: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if path == "/late":
        monkeypatch.setattr(browse_module, "_TIMEOUT_S", 1.0)
    with serving(answers) as server:
        found = browse(server.url + path)
    assert found.outcome is ToolOutcome.ERROR
    assert said in found.text


NO_ADDRESSES = (
    *("ftp://a.b/c", "no address", "http://", "file:///etc/passwd", "http://no-such-host.invalid/"),
    *("http://8.8.8.8:70000/", "http://127.0.0.1:99999999999999999999/"),
)
PRIVATE = (
    *("127.0.0.1", "localhost", "[::1]", "169.254.169.254", "10.0.0.1", "192.168.1.1", "0.0.0.0", "224.0.0.1"),
    *("[64:ff9b::a00:5]", "[::ffff:10.0.0.1]", "[2002:7f00:1::]", "[fec0::1]", "[::127.0.0.1]"),
)


@pytest.mark.parametrize("url", NO_ADDRESSES)
def test_what_is_no_address_is_told_to_the_policy(url: str) -> None:
    assert browse(url).outcome is ToolOutcome.ERROR


@pytest.mark.parametrize("host", PRIVATE)
def test_addresses_that_are_not_public_are_not_fetched(host: str) -> None:
    found = browse(f"http://{host}:9/", allow_private=False)
    assert found.outcome is ToolOutcome.ERROR
    assert "is not a public address" in found.text


def test_a_redirection_to_an_address_that_is_not_public_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = []

    async def request(self: BrowseTool, url: str) -> Any:
        checked.append(url)
        if len(checked) == 2:  # the page that it was sent to, as if the first had been public
            self._config = self._config.model_copy(update={"allow_private": False})
        return await original(self, url)

    original = BrowseTool._request
    monkeypatch.setattr(BrowseTool, "_request", request)
    with serving(answers) as server:
        found = browse(server.url + "/moved")
        assert checked == [server.url + "/moved", server.url + "/page"]
        assert "is not a public address" in found.text
        assert len(server.asked) == 1


def test_a_resolver_that_cannot_tell_is_no_answer_for_the_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    with pytest.raises(ToolBroken, match=r"example.org cannot be resolved"):
        browse("http://example.org/")


def test_an_empty_page_is_no_error() -> None:
    with serving(answers) as server:
        assert browse(server.url + "/empty").outcome is ToolOutcome.EMPTY


def test_a_page_is_kept_and_not_fetched_again_by_another_run(tmp_path: Path) -> None:
    with serving(answers) as server:
        texts = [browse(server.url + "/page", cache=str(tmp_path / "pages.jsonl")).text for _ in range(2)]
        assert len(server.asked) == 1
    assert texts[0] == texts[1]


def test_a_page_is_summarised_by_a_model_that_sees_query_and_passage() -> None:
    def summary(asked: Any, _: int) -> Any:
        shown = asked.body["messages"][0]["content"]
        assert "Query: Norway" in shown
        assert "Öslo" in shown
        return chat_service.said("A city.")

    with serving(answers) as server, chat_service.serving(summary) as service:
        found = browse(server.url + "/page", summary={"url": service.url, "model": "m"})
    assert found.text == "A city."


def test_a_page_that_the_summariser_refuses_is_told_to_the_policy() -> None:
    refused = Answer(body={"error": "too long"}, status=400)
    with serving(answers) as server, serving(lambda asked, number: refused) as service:
        found = browse(server.url + "/page", summary={"url": service.url, "model": "m"})
    assert found.outcome is ToolOutcome.ERROR
    assert "refused it with status 400" in found.text


def test_a_summariser_with_a_wrong_key_ends_the_run() -> None:
    refused = Answer(body={"error": "key"}, status=401)
    with (
        serving(answers) as server,
        serving(lambda asked, number: refused) as service,
        pytest.raises(UserError, match=r"browse.summary: .* answered 401"),
    ):
        browse(server.url + "/page", summary={"url": service.url, "model": "m"})


def test_a_long_page_is_cut_to_the_passage_with_the_most_words_of_the_query() -> None:
    text = "filler words here. " * 300 + "The tower of Oslo is high. " + "more filler text. " * 300
    found = passage(text, "How high is the tower of Oslo?", max_chars=200)
    assert "The tower of Oslo is high." in found
    assert len(found) <= 200
    assert passage("short", "anything", max_chars=200) == "short"


def test_no_more_than_the_largest_page_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browse_module, "_MAX_BYTES", 1 << 20)
    big = Answer(body=b"x" * (3 << 20), headers={"Content-Type": "text/plain"})
    with serving(lambda asked, number: big) as server:
        body, _, _ = with_tool(lambda tool: tool._fetch(server.url + "/"))
    assert 1 << 20 <= len(body) < 2 << 20
