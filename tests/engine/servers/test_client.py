"""Our HTTP to an engine's server, against what servers do to connections."""

import asyncio

import pytest

from strop.engine.servers.server import ServerClient
from strop.errors import EngineLost

_ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"done":true}'


@pytest.mark.parametrize("at_once", [False, True])
def test_a_server_that_hangs_up_what_it_takes_for_idle_loses_no_call(at_once):
    async def scenario():
        async def serve(reader, writer):
            for answer in (_ANSWER, b""):  # offers to keep the connection, then is too busy to read for too long
                if await _read_request(reader):
                    writer.write(answer)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = ServerClient("the server", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            calls = [client.post("/generate", {"number": number}, timeout_s=10.0) for number in range(4)]
            return await asyncio.gather(*calls) if at_once else [await call for call in calls]
        finally:
            await client.close()
            server.close()

    assert asyncio.run(scenario()) == [{"done": True}] * 4


def ask_a_server_that_answers(content):
    """Post one request to a server that answers with these bytes and hangs up."""

    async def scenario():
        async def serve(reader, writer):
            await _read_request(reader)
            writer.write(content)
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = ServerClient("the server", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            await client.post("/generate", {}, timeout_s=10.0)
        finally:
            await client.close()
            server.close()

    asyncio.run(scenario())


def test_a_server_that_hangs_up_on_a_new_connection_is_lost():
    with pytest.raises(EngineLost, match="the server: /generate: Server disconnected"):
        ask_a_server_that_answers(b"")


@pytest.mark.parametrize("body", ["<html>", "[" * 100_000, "9" * 5_000, '"\\ud800"', "\udcff"])
def test_an_answer_that_is_no_json_is_a_lost_engine(body):
    content = body.encode(errors="surrogateescape")
    with pytest.raises(EngineLost, match="the server answered /generate with no JSON"):
        ask_a_server_that_answers(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(content) + content)


async def _read_request(reader):
    head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
    length = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return head + await reader.readexactly(length)
