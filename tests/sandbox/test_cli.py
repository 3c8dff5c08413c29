"""`strop sandbox ...` as a person types it."""

from __future__ import annotations

import io
import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from strop.cli.sandbox import app, in_options
from strop.errors import UserError
from strop.sandbox.protocol import IsolationLevel
from strop.sandbox.supervisor.node import Node

STROP = [sys.executable, "-m", "strop.cli", "sandbox"]


def strop(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run([*STROP, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    ("code", "said", "exit_code", "told"),
    [
        ("print(6 * 7)", "42\n", 0, ""),
        ("6 * 7", "42\n", 0, ""),
        ("print('so far')\nraise SystemExit(3)", "so far\nThe program exited with code 3.\n", 3, "[error]\n"),
        ("while True: pass", "", 124, "[timeout: it ran longer than --wall-s 1]\n"),
        (
            "while True: print('x' * 99999)",
            "[... output went on; the program was stopped ...]",
            137,
            "[killed: output]\n",
        ),
    ],
)
def test_run_prints_what_a_policy_sees_names_the_limit_and_exits_as_the_program_did(
    code: str, said: str, exit_code: int, told: str
) -> None:
    done = strop("run", "-", "--wall-s", "1", stdin=code)
    assert (done.returncode, done.stderr) == (exit_code, told)
    assert done.stdout.endswith(said) or said in done.stdout


def test_run_takes_a_level_below_the_usual_one_and_a_seed() -> None:
    drawn = {
        seed: json.loads(
            strop("run", "-", "--level", "confined", "--seed", seed, "--json", stdin="import random; random.random()").stdout
        )
        for seed in ("3", "4")
    }
    assert {result["level"] for result in drawn.values()} == {"confined"}
    assert drawn["3"]["text"] != drawn["4"]["text"]


def test_a_program_that_is_not_utf8_is_named_with_the_place(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_bytes(b"print('\xff')")
    refused = strop("run", str(program))
    assert refused.returncode == 2
    assert refused.stderr == f"error: {program}: is not UTF-8 (byte 7); programs and their input must be UTF-8.\n"


def test_messages_name_options_where_a_recipe_has_keys() -> None:
    said = "sandbox.min_level is 'strict' (L3). Or accept less with sandbox.min_level = 'namespaces': no."
    assert in_options(said) == "--min-level is 'strict' (L3). Or accept less with --min-level namespaces: no."
    assert in_options("leave sandbox.level out, or lower sandbox.level.") == "leave --level out, or lower --level."
    for said in (
        "sandbox.py: cannot be read",
        "/tmp/sandbox.url/a: no such file",
        "my-sandbox.level.txt",
        "raise sandbox.max_sessions, sandbox.levels or sandbox.file",
    ):
        assert in_options(said) == said


def test_check_tells_once_why_a_level_does_not_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(node: Node, level: IsolationLevel) -> str:
        return "no user namespaces here"

    monkeypatch.setattr(Node, "_attack", fail)
    done = CliRunner().invoke(app, ["check"])
    assert isinstance(done.exception, UserError)
    said = f"{done.output}{done.exception}"
    assert said.count("no user namespaces here") == 1
    assert "namespaces does not start" in said
    assert "--min-level is 'namespaces' (L2), and this machine does not give it:\nTo get L2: allow user namespaces" in said


def test_run_gives_the_program_its_input_and_tells_all_as_json(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("print(input()[::-1])")
    (tmp_path / "input").write_text("stressed")
    done = strop("run", str(tmp_path / "program.py"), "--stdin", str(tmp_path / "input"), "--json", "--min-level", "L2")
    result = json.loads(done.stdout)
    assert (result["outcome"], result["text"], result["level"]) == ("stdout", "desserts\n", "namespaces")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere.py"], "nowhere.py: cannot be read: No such file or directory."),
        (["run", "sandbox.py"], "error: sandbox.py: cannot be read: No such file or directory."),
        (["run", "-", "--min-level", "L9"], "there is no level 'L9'"),
        (["run", "-", "--url", "http://127.0.0.1:9"], "http://127.0.0.1:9"),
        (["serve", "--host", "0.0.0.0"], "without a token"),
        (["serve", "--warm", "bare,pandas"], "warm"),
        (["run", "-", "--level", "L1", "--url", "http://127.0.0.1:9"], "--level is for this machine"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    strop: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
    monkeypatch.setenv("STROP_LOG", "WARNING")  # else `serve` changes what later tests log
    status, said = strop("sandbox", *arguments)  # in this process
    assert status == 2
    assert message in " ".join(said.replace("│", " ").split())


WITHOUT_EXTRAS = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("aiohttp", "prometheus_client", "psutil"): raise ImportError(f"no {name}", name=name)
sys.meta_path.insert(0, Missing())
from strop.errors import UserError
from strop.sandbox import Sandbox
with Sandbox() as box: print(box.run("6 * 7").text)
try: Sandbox(url="http://127.0.0.1:9")
except UserError as error: print(error)
"""


def test_a_sandbox_on_this_machine_needs_no_extra_and_a_service_names_its_own() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("42\n"), done.stderr
    assert "pip install 'strop[serve]'" in done.stdout


def test_check_tells_which_level_holds() -> None:
    found = json.loads(strop("check", "--json").stdout)
    assert found["level"] == "namespaces"
    assert set(found["packages"]) == {"numpy", "scipy", "sympy", "mpmath"}  # rStar2-Agent section 2.1 names the first three
    assert all(probe["held"] for probe in found["tried"]["namespaces"]["probes"] if probe["level"] != "strict")


def test_serve_offers_the_service_and_ends_in_order_on_sigterm(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-token-for-this-test\n")
    command = [*STROP, "serve", "--port", "0", "--token-file", str(tmp_path / "token"), "--warm", "bare"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        [url] = re.findall(r"http://[\d.:]+", server.stdout.readline())
        (tmp_path / "program.py").write_text("print(6 * 7)")
        program = str(tmp_path / "program.py")
        assert strop("run", program, "--url", url, "--token-file", str(tmp_path / "token")).stdout == "42\n"
        refused = strop("run", program, "--url", url)
        assert (refused.returncode, "token" in refused.stderr) == (2, True)
        with urllib.request.urlopen(f"{url}/openapi.json", timeout=10) as reply:
            assert json.load(reply)["openapi"].startswith("3.1")
        server.send_signal(signal.SIGTERM)
        started_at = time.monotonic()
        assert server.wait(20) == 0
        assert time.monotonic() - started_at < 10


def test_control_c_ends_a_run_that_waits_for_a_service_at_once_and_speaks_of_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("1")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(30)
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        command = [*STROP, "run", str(tmp_path / "program.py"), "--url", url]
        with subprocess.Popen(
            # A job in the background of a shell ignores Ctrl-C, and its children would with it.
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        ) as running:
            connection, _ = silent.accept()
            with connection:
                connection.recv(1)
                running.send_signal(signal.SIGINT)
                _, said = running.communicate(timeout=10)
    assert (running.returncode, said) == (130, "\nstopped.\n")
