"""What the service refuses over HTTP, and in which words: mistakes, other methods, wrong tokens, open doors."""

from __future__ import annotations

import asyncio

import pytest
from services import answers_by_key, asking, dead, run_lines, scripted, serving

from strop.errors import UserError
from strop.sandbox.server import http as http_front
from strop.sandbox.server.dispatcher import DispatchConfig
from strop.sandbox.server.server import ServeConfig

TOKEN = "correct horse battery"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "words"),
    [
        ("POST", "/v1/run", b"", 400, "the body is empty; it has to be a RunRequest in JSON"),
        ("POST", "/v1/run", b"{", 400, "Invalid JSON"),
        ("POST", "/v1/run", b'{"code": 1}', 400, "code: Input should be a valid string"),
        ("POST", "/v1/run", b'{"code": "x", "cod": 1}', 400, "cod"),
        ("POST", "/v1/run", b'{"code": "x", "session": "gone"}', 410, "gone"),
        ("POST", "/v1/run", b" " * 2000, 413, "more than 1500 bytes"),
        ("POST", "/v1/verify", b'{"pairs": [["1", "1"]]}', 400, "pairs.0"),
        ("POST", "/v1/verify", b'{"pairs": [], "pair_wall_s": -1}', 400, "pair_wall_s"),
        ("POST", "/v1/sessions", b'{"memory_mib": -1}', 400, "memory_mib is -1"),
        ("POST", "/v1/sessions/gone/fork", b"", 410, "gone"),
        ("POST", "/v1/tests", b'{"code": "x"}', 400, "tests"),
        ("POST", "/v1/cancel", b"[]", 400, "CancelRequest"),
        ("GET", "/v1/run", b"", 405, "/v1/run takes POST, not GET"),
        ("GET", "/v2/run", b"", 404, "Not Found"),
        ("GET", "/v1/sessions/%ED%A0%80", b"", 405, ""),
    ],
)
def test_a_mistake_is_told_as_json_with_its_reason(
    method: str, path: str, body: bytes, status: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_front, "MAX_BODY_BYTES", 1500)

    async def play() -> None:
        async with serving(scripted()) as server, asking(server) as http:
            async with http.request(method, path, data=body) as response:
                assert response.status == status
                assert words in (await response.json())["error"]["message"]
            async with http.post("/v1/run", data=b'{"code": "x"}') as response:
                assert response.status == 200

    asyncio.run(play())


def test_a_method_that_a_route_does_not_take_is_told_as_such_with_those_it_takes() -> None:
    async def play() -> None:
        async with serving(scripted()) as server, asking(server) as http, http.get("/v1/sessions/s") as response:
            assert (response.status, response.headers["Allow"]) == (405, "DELETE")
            assert (await response.json())["error"]["kind"] == "method_not_allowed"

    asyncio.run(play())


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({}, "asks for a token"),
        ({"Authorization": TOKEN}, "asks for a token"),
        ({"Authorization": f"Basic {TOKEN}"}, "asks for a token"),
        ({"Authorization": "Bearer wrong"}, "is not the one"),
    ],
)
def test_a_token_that_is_not_taken_is_answered_with_how_to_send_it(headers: dict[str, str], words: str) -> None:
    async def play() -> None:
        async with (
            serving(scripted(), token=TOKEN) as server,
            asking(server, **headers) as http,
            http.post("/v1/run", data=b'{"code": "x"}') as response,
        ):
            assert (response.status, response.headers["WWW-Authenticate"]) == (401, "Bearer")
            message = (await response.json())["error"]["message"]
            assert words in message
            assert "Authorization: Bearer <token>" in message

    asyncio.run(play())


def test_who_has_no_token_learns_nothing_but_that_the_service_lives() -> None:
    async def play() -> None:
        async with serving(scripted(), token=TOKEN) as server:
            for headers in (
                {},
                {"Authorization": "Bearer wrong"},
                {"Authorization": f"Basic {TOKEN}"},
                {"Authorization": TOKEN},
                {"Authorization": "Bearer "},
            ):
                async with asking(server, **headers) as http:
                    for route in server.http.app.router.routes():
                        path = route.resource.canonical.replace("{session}", "s")
                        async with http.request(route.method, path) as response:
                            expected = (200, 200) if path in ("/v1/health", "/openapi.json") else (401, 401)
                            assert response.status in expected, path
                    async with http.get("/v1/health") as response:
                        assert await response.json() == {"status": "ok", "num_held": 0, "num_sessions": 0, "nodes": []}
            async with asking(server, Authorization=f"Bearer {TOKEN}") as http:
                async with http.post("/v1/run", data=b'{"code": "x"}') as response:
                    assert response.status == 200
                async with http.get("/v1/health") as response:
                    assert (await response.json())["nodes"][0]["num_slots"] == 8

    asyncio.run(play())


def test_a_service_without_nodes_says_so_and_when_to_come_again() -> None:
    async def play() -> None:
        async with serving(dead(), dispatch=DispatchConfig(no_node_s=0.1)) as server, asking(server) as http:
            for path, body in (
                ("/v1/run", {"code": "x"}),
                ("/v1/tests", {"code": "x", "tests": [{"stdin": "", "expected": ""}]}),
                ("/v1/verify", {"pairs": [{"gold": "1", "answer": "1"}]}),
                ("/v1/sessions", {}),
            ):
                async with http.post(path, json=body) as response:
                    assert (response.status, response.headers["Retry-After"]) == (503, "5"), path
                    assert (await response.json())["error"]["kind"] == "no_nodes"
            async with http.post("/v1/runs", data=run_lines((1, {"code": "x"}))) as response:
                assert answers_by_key(await response.read())[1]["error"]["kind"] == "no_nodes"

    asyncio.run(play())


@pytest.mark.parametrize("settings", [{"host": "0.0.0.0"}, {"host": "::"}, {"token": "short"}])
def test_a_service_that_others_could_reach_is_refused_without_a_good_token(settings: dict[str, object]) -> None:
    with pytest.raises(UserError, match="token"):
        ServeConfig(**settings)
