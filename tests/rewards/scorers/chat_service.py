"""A real HTTP server on this machine in the form of a chat service, or of any other; each test says how it answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(kw_only=True)
class Answer:
    body: Any  # sent as JSON, unless it is bytes
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


@dataclass(kw_only=True)
class Asked:
    path: str
    body: Any
    key: str
    time: float


def said(text: Any, finish_reason: str = "stop") -> Answer:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish_reason}
    return Answer(body={"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Print no traceback: a client that ends before its answer resets its connection."""


class Service:
    def __init__(self, answer: Callable[[Asked, int], Answer]) -> None:
        self.asked: list[Asked] = []
        self.most_at_once = 0
        self._at_once = 0
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True  # else each answer waits 40 ms for the acknowledgement of its headers

            def log_message(self, *_: object) -> None:
                pass

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                asked = Asked(path=self.path, body=body, key=self.headers.get("Authorization", ""), time=time.monotonic())
                with lock:
                    outer.asked.append(asked)
                    number = len(outer.asked) - 1
                    outer._at_once += 1
                    outer.most_at_once = max(outer.most_at_once, outer._at_once)
                told = answer(asked, number)
                time.sleep(told.delay_s)
                with lock:
                    outer._at_once -= 1
                sent = told.body if isinstance(told.body, bytes) else json.dumps(told.body).encode()
                try:
                    self.send_response(told.status)
                    for name, value in told.headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(sent)))
                    self.end_headers()
                    self.wfile.write(sent)
                except OSError:
                    pass  # it did not wait

        self._server = QuietServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def serving(answer: Callable[[Asked, int], Answer]) -> Iterator[Service]:
    service = Service(answer)
    try:
        yield service
    finally:
        service.close()
