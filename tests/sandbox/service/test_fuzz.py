"""Whatever comes over a wire: nothing raises that should not, nothing hangs, and no call gets the answer of another."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from links import peer_of_node_process
from services import scripted, serving

from strop.errors import MachineError, StropError
from strop.sandbox.client import SandboxClient
from strop.sandbox.node_process import Link
from strop.sandbox.protocol import RunRequest
from strop.sandbox.scripted import scripted_result
from strop.sandbox.server.dispatcher import DispatchConfig
from strop.sandbox.server.ndjson import LineSplitter, RunLine, TooLong, Unreadable, read_run_line

slow_ok = settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)
run_requests = st.builds(
    RunRequest,
    code=st.text(),
    stdin=st.text(),
    wall_s=st.floats(),
    cpu_s=st.none() | st.floats(allow_nan=False),
    memory_mib=st.integers(),
    seed=st.integers(),
    session=st.text(max_size=5),
    id=st.text(max_size=5),
)


# Messages between the supervisor and its sandbox


@given(st.lists(run_requests, max_size=6), st.data())
def test_every_request_arrives_as_it_was_sent_however_its_bytes_are_cut(
    requests: list[RunRequest], data: st.DataObject
) -> None:
    bodies = [pickle.dumps((number, "run", request)) for number, request in enumerate(requests, start=1)]
    wire = b"".join(struct.pack("<I", len(body)) + body for body in bodies)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    received: list[Any] = []

    async def play() -> None:
        link = Link(received.append, lambda reason: None)
        for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True):
            link.data_received(wire[start:end])

    asyncio.run(play())
    assert repr([request for _, _, request in received]) == repr(requests)  # repr: nan is not equal to itself


@slow_ok
@given(st.permutations(range(1, 7)), st.sets(st.integers(1, 6), max_size=3), st.sets(st.integers(1, 6), max_size=3))
def test_answers_find_their_calls_in_any_order_though_some_were_given_up_and_some_come_twice(
    order: list[int], given_up: set[int], twice: set[int]
) -> None:
    async def play() -> None:
        async with peer_of_node_process() as (remote, peer, received):
            calls = {number: asyncio.create_task(remote.run(RunRequest(code=str(number)))) for number in range(1, 7)}
            await asyncio.sleep(0)
            for number in given_up:
                calls[number].cancel()
            await asyncio.sleep(0)
            for number in [*order, *twice]:
                peer.send((number, scripted_result(f"answer {number}"), True))
            peer.send((6, MachineError("too late"), True))
            for number in set(calls) - given_up:
                assert (await asyncio.wait_for(calls[number], 1)).text == f"answer {number}"
            assert {number for number, method, _ in received if method == "cancel"} == given_up

    asyncio.run(play())


# Lines of HTTP bodies


@given(st.lists(st.binary(max_size=40).filter(lambda line: b"\n" not in line), max_size=8), st.data())
def test_lines_are_found_however_their_bytes_are_cut(lines: list[bytes], data: st.DataObject) -> None:
    wire = b"".join(line + b"\n" for line in lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(wire)), max_size=12)))
    splitter = LineSplitter(max_line_bytes=20)
    found = [line for start, end in zip([0, *cuts], [*cuts, len(wire)], strict=True) for line in splitter.feed(wire[start:end])]
    assert len(found) == len(lines)
    for line, read in zip(lines, found, strict=True):
        assert read == line if len(line) <= 20 else isinstance(read, TooLong) and line.startswith(read.head)
    assert splitter.end() == []


nearly_lines = st.builds(
    lambda tree: json.dumps(tree).encode(),
    st.fixed_dictionaries(
        {},
        optional={
            "key": json_values,
            "request": json_values | st.fixed_dictionaries({"code": st.text(), "wall_s": json_values}),
        },
    ),
)


@given(st.binary(max_size=80) | nearly_lines | json_values.map(lambda value: json.dumps(value).encode()))
def test_a_line_is_a_call_or_is_told_why_not(line: bytes) -> None:
    read = read_run_line(line, max_line_bytes=100)
    if isinstance(read, Unreadable):
        assert read.why
        if read.key is not None:
            json.dumps(read.key).encode()
    else:
        assert isinstance(read, RunLine)


# A live service


class Live:
    """A service in a thread of its own, for clients that know no event loop."""

    def __init__(self) -> None:
        self.port = 0
        self.held = lambda: -1
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._is_up = threading.Event()
        self._errors: list[dict[str, Any]] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._is_up.wait(10)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)
        assert not self._thread.is_alive()
        assert self._errors == []  # nothing was raised where nobody could catch it

    def _run(self) -> None:
        self._loop.set_exception_handler(lambda loop, context: self._errors.append(context))
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        dispatch = DispatchConfig(linger_s=0.0)
        async with serving(scripted(slots=50, latency_s=0.01), dispatch=dispatch) as server:
            self.port = server.port
            self.held = lambda: server.dispatcher.admission.held.num
            self._is_up.set()
            await self._stop.wait()


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    service = Live()
    yield service
    service.close()


def is_well(live: Live) -> None:
    result = httpx2.post(f"http://127.0.0.1:{live.port}/v1/run", json={"code": "well"}, timeout=2).json()
    assert result["text"] == "ran well"


paths = st.sampled_from(
    [
        "/v1/run",
        "/v1/runs",
        "/v1/verify",
        "/v1/cancel",
        "/v1/tests",
        "/v1/sessions",
        "/v1/sessions/x/fork",
        "/v1/health",
        "/nowhere",
    ]
)


@slow_ok
@given(
    paths,
    st.binary(max_size=200)
    | json_values.map(lambda value: json.dumps(value).encode())
    | st.lists(nearly_lines).map(b"\n".join),
)
def test_any_body_on_any_route_is_answered_with_json(live: Live, path: str, body: bytes) -> None:
    response = httpx2.post(f"http://127.0.0.1:{live.port}{path}", content=body, timeout=3)
    assert response.status_code in (200, 400, 404, 405, 410, 413)
    for line in response.content.splitlines():
        if line:
            json.loads(line)
    is_well(live)


heads = st.sampled_from(
    [
        b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Length: 30\r\n\r\n",
        b"POST /v1/run HTTP/1.1\r\nHost: x\r\nContent-Length: 9999999999\r\n\r\n",
        b"POST /v1/runs HTTP/1.1\r\nHost: x\r\nContent-Encoding: gzip\r\nContent-Length: 20\r\n\r\n",
        b"POST /v1/verify HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"GET /v1/health HTTP/1.1\r\nAuthorization: Bearer \xff\xfe\r\nX-Strop-Client: \xe9\r\nHost: x\r\n\r\n",
        b"",
    ]
)


@slow_ok
@given(
    heads,
    st.binary(max_size=100)
    | st.just(b"5\r\nabcde\r\n")
    | st.just(b'3a\r\n{"key": 1, "request": {"code": "x"}}\n\r\n0\r\n\r\n'),
)
def test_any_bytes_at_the_port_harm_nobody_else(live: Live, head: bytes, rest: bytes) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=2) as connection:
        connection.sendall(head + rest)
        connection.shutdown(socket.SHUT_WR)
    is_well(live)


calls = st.tuples(st.text(max_size=8).filter(lambda code: "\0" not in code), st.booleans())


@slow_ok
@given(st.lists(calls, max_size=20), st.data())
def test_no_call_of_a_stream_is_mixed_up_with_another(live: Live, script: list[tuple[str, bool]], data: st.DataObject) -> None:
    """Some lines are broken, and the body is cut into chunks anywhere."""
    lines, expected, num_broken = [], {}, 0
    for number, (code, is_fine) in enumerate(script):
        if is_fine:
            lines.append(json.dumps({"key": number, "request": {"code": code, "seed": number}}).encode())
            expected[number] = f"ran {code}"
        else:
            lines.append(data.draw(st.sampled_from([b"{", b"[]", b'"', b"\xff", b'{"key": {}, "request": {}}'])))
            num_broken += 1
    body = b"\n".join(lines)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=8)))
    parts = [body[start:end] for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True)]
    response = httpx2.post(f"http://127.0.0.1:{live.port}/v1/runs", content=iter(parts), timeout=5)
    answers = [json.loads(line) for line in response.content.splitlines() if line]
    assert len(answers) == len(lines)
    assert {a["key"]: a["result"]["text"] for a in answers if a["key"] is not None} == expected
    assert sum(a["key"] is None and a["result"]["outcome"] == "rejected" for a in answers) == num_broken


def test_nothing_is_held_after_all_of_it(live: Live) -> None:
    is_well(live)
    assert live.held() == 0


# What a service, or something that is none, may say to the client


@settings(deadline=None, max_examples=15)
@given(
    st.lists(
        st.binary(max_size=40)
        | st.just(b'{"key": 1, "result": 3}')
        | st.just(b'{"key": 99, "error": {"kind": "invalid", "message": ""}}'),
        max_size=4,
    ),
    st.booleans(),
)
def test_whatever_answers_the_client_its_call_ends_with_a_typed_error(lines: list[bytes], is_http: bool) -> None:
    async def play() -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1000)
            writer.write((b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" if is_http else b"") + b"\n".join(lines))
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with SandboxClient(url, connect_s=0.05, reconnect_s=0.05) as client:
                with pytest.raises(StropError):
                    await asyncio.wait_for(client.run(RunRequest(code="x")), 5)

    asyncio.run(play())
