"""Peers without a token cannot stop the service: half-sent requests, many connections, no descriptors, compressed bodies."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import resource
import tracemalloc
from collections.abc import AsyncIterator

import pytest
from services import asking, scripted, serving

from strop.sandbox.server import server

HALF = b"POST /v1/run HTTP/1.1\r\nHost: x\r\nContent-Le"


@contextlib.asynccontextmanager
async def connections(port: int, num: int) -> AsyncIterator[list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]]:
    """So many connections, each with a half-sent request."""
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(num)]
    for _, writer in opened:
        writer.write(HALF)
    yield opened
    for _, writer in opened:
        writer.close()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What the service still sent; nothing if the kernel reset the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionError:
        return b""


def test_headers_that_do_not_end_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_HEADERS_S", 0.3)

    async def play() -> None:
        async with serving(scripted()) as service, connections(service.port, 20) as opened:
            for number in range(4):
                await asyncio.sleep(0.1)
                for _, writer in opened:
                    writer.write(b"%d" % number)  # bytes that trickle in do not extend the time
            assert [await rest(reader) for reader, _ in opened] == [b""] * 20

    asyncio.run(play())


def test_connections_are_limited_and_a_closed_one_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "_MAX_CONNECTIONS", 8)

    async def play() -> None:
        async with serving(scripted()) as service:
            async with connections(service.port, 20) as opened:
                for reader, _ in opened[8:]:
                    assert (await rest(reader))[:12] in (b"", b"HTTP/1.1 503")
            await asyncio.sleep(0.05)
            async with asking(service) as http, http.post("/v1/run", json={"code": "x"}) as response:
                assert response.status == 200

    asyncio.run(play())


def test_connections_never_take_the_last_descriptors(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    reserved = 40 + max(map(int, os.listdir("/proc/self/fd")))  # other tests of this process may have left files open
    monkeypatch.setattr(server, "_RESERVED_DESCRIPTORS", reserved)

    async def play() -> None:
        async with serving(scripted()) as service:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (reserved + 4, hard))
            try:
                async with connections(service.port, 10) as opened:
                    for reader, _ in opened[4:]:
                        assert (await rest(reader))[:12] in (b"", b"HTTP/1.1 503")
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    asyncio.run(play())
    assert not caplog.records


@pytest.mark.parametrize("path", ["/v1/run", "/v1/runs", "/v1/verify"])
@pytest.mark.parametrize("body", [gzip.compress(bytes(20 << 20)), b"not gzip at all"], ids=["bomb", "broken"])
def test_compressed_bodies_are_refused_and_never_expanded(path: str, body: bytes) -> None:
    async def play() -> int:
        async with serving(scripted()) as service, asking(service, **{"Content-Encoding": "gzip"}) as http:
            tracemalloc.start()
            async with http.post(path, data=body) as response:
                assert response.status == 400
                assert "Content-Encoding: gzip" in (await response.json())["error"]["message"]
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            return peak

    assert asyncio.run(play()) < 4 << 20
