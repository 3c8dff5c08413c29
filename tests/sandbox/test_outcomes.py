"""What a program does, and what is reported of it."""

from __future__ import annotations

import pytest

from strop.sandbox import RunOutcome, RunResult, Sandbox


def told(result: RunResult) -> tuple[str, str]:
    return result.outcome.value, result.text


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("print(6 * 7)", ("stdout", "42\n")),
        ("print()", ("stdout", "\n")),
        ("import sys; print('careful', file=sys.stderr)", ("stdout", "careful\n")),
        ("import sys; sys.stdout.write('no newline')", ("stdout", "no newline")),
        ("import os; os.write(1, b'raw')", ("stdout", "raw")),
        ("print('one')\n2", ("stdout", "one\n")),  # something was printed, so the value is not shown
        ("6 * 7", ("echo", "42")),
        ("x = [1,\n  2,\n]\n(\n  x\n)  # a comment", ("echo", "[1, 2]")),
        ("'é\\n'", ("echo", "'é\\n'")),
        ("5; 6", ("echo", "6")),
        ("from __future__ import annotations\ndef f(x: undefined): ...\nf.__annotations__", ("echo", "{'x': 'undefined'}")),
        ("5;", ("empty", "")),
        ("5 ; # hidden", ("empty", "")),
        ("'é' ;", ("empty", "")),
        ("None", ("empty", "")),
        ("x = 5", ("empty", "")),
        ("", ("empty", "")),
        ("# nothing\n", ("empty", "")),
        ("\ufeff7", ("echo", "7")),
        ("if __name__ == '__main__':\n    print('main')", ("stdout", "main\n")),
        ("raise SystemExit", ("empty", "")),
        ("print(1)\nraise SystemExit(0)", ("stdout", "1\n")),
        ("print(1)\nexit()", ("stdout", "1\n")),
        ("raise SystemExit(3)", ("error", "The program exited with code 3.\n")),
        ("import sys; sys.exit('enough')", ("error", "enough\nThe program exited with code 1.\n")),
        ("import os; os._exit(7)", ("error", "The program exited with code 7.\n")),
        ("print('\\ud800')", ("stdout", "\\ud800\n")),
        ("import atexit; atexit.register(print, 'bye')", ("stdout", "bye\n")),
        ("import threading; threading.Timer(0.05, print, ['late']).start()", ("stdout", "late\n")),
        ("import builtins; builtins.print = builtins.repr = None; 1", ("echo", "1")),
        ("import os\nif os.fork() == 0:\n    1\nelse:\n    os.wait()\n2", ("echo", "2")),
    ],
)
def test_a_program_is_told_as_a_person_at_a_prompt_would_see_it(box: Sandbox, code: str, expected: tuple[str, str]) -> None:
    assert told(box.run(code)) == expected


def test_an_error_shows_the_program_and_nothing_of_the_runner(box: Sandbox) -> None:
    result = box.run("def half(x):\n    return x / 0\n\nhalf(1)")
    assert result.outcome is RunOutcome.ERROR
    assert result.exit_code == 1
    assert result.text == (
        "Traceback (most recent call last):\n"
        '  File "<code>", line 4, in <module>\n    half(1)\n'
        '  File "<code>", line 2, in half\n    return x / 0\n           ~~^~~\n'
        "ZeroDivisionError: division by zero\n"
    )


def test_a_traceback_through_the_standard_library_hides_where_it_lies(box: Sandbox) -> None:
    text = box.run("import json; json.loads('{')").text
    assert 'File "python/json/decoder.py"' in text
    assert text.count('File "') == text.count('File "python/') + text.count('File "<code>"')


@pytest.mark.parametrize(
    ("code", "last_line"),
    [
        ("x = = 1", "SyntaxError: invalid syntax"),
        ("await x", "SyntaxError: 'await' outside function"),
        ("  x", "IndentationError: unexpected indent"),
        ("input()", "EOFError: EOF when reading a line"),
        ("def f(n): return f(n + 1)\nf(0)", "RecursionError: maximum recursion depth exceeded"),
        ("class E(Exception):\n    def __str__(self): raise ValueError\nraise E", "E: <exception str() failed>"),
        ("class V:\n    def __repr__(self): raise ValueError('no repr')\nV()", "ValueError: no repr"),
        ("kept = []\nwhile True: kept.append([0])", "MemoryError"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("x = 'a' * (1 << 40)", "MemoryError"),
        ("open('big', 'wb').write(b'0' * (32 << 20))", "OSError: [Errno 27] File too large"),
        ("import os; os.closerange(0, 256); print(1)", "OSError: [Errno 9] Bad file descriptor"),
        ("import sys; sys.modules.clear(); 1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_the_mistakes_of_a_program_are_errors_that_name_themselves(box: Sandbox, code: str, last_line: str) -> None:
    result = box.run(code, memory_mib=128)
    assert result.outcome is RunOutcome.ERROR
    assert result.text.endswith(last_line + "\n")


def test_a_syntax_error_shows_its_line(box: Sandbox) -> None:
    assert box.run("x = 1\nreturn x").text.splitlines()[:2] == ['  File "<code>", line 2', "    return x"]


def test_a_recursion_without_limit_ends_in_a_short_error(box: Sandbox) -> None:
    result = box.run("import sys; sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1)\nf(0)", memory_mib=128)
    assert result.outcome is RunOutcome.ERROR  # MemoryError, or what CPython makes of it
    assert "[Previous line repeated 1996 more times]" in result.text
    assert len(result.text) < 1_000


def test_what_was_printed_before_an_exception_is_kept(box: Sandbox) -> None:
    result = box.run("print('so far', end='')\n1 / 0")
    assert result.outcome is RunOutcome.ERROR
    assert result.text.startswith("so far\nTraceback (most recent call last):\n")


def test_memory_beyond_the_limit_is_an_error_and_below_it_is_not(box: Sandbox) -> None:
    assert box.run("len(bytes(40 << 20))", memory_mib=64).text == str(40 << 20)
    assert box.run("len(bytes(80 << 20))", memory_mib=64).text.endswith("MemoryError\n")


def test_a_program_killed_by_a_signal_says_which(box: Sandbox) -> None:
    result = box.run("import ctypes; ctypes.string_at(0)")
    assert (result.outcome, result.reason, result.exit_code) == (RunOutcome.KILLED, "signal 11", None)


@pytest.mark.parametrize(
    ("code", "stdin", "text"),
    [
        ("print(int(input()) + int(input()))", "3\n4", "7\n"),
        ("import sys; print(len(sys.stdin.read()))", "é" * 4_000_000, "4000000\n"),
        ("print('not read')", "x" * 5_000_000, "not read\n"),
        ("import sys; print(sorted(sys.stdin))", "b\na\n", "['a\\n', 'b\\n']\n"),
    ],
)
def test_stdin_is_the_input_read_or_not(box: Sandbox, code: str, stdin: str, text: str) -> None:
    assert told(box.run(code, stdin=stdin)) == ("stdout", text)


@pytest.mark.parametrize(
    ("code", "stdin", "reason"),
    [
        ("x = 1\0", "", "the code holds a NUL character"),
        ("'\ud800'", "", "the code holds a lone surrogate, which has no encoding"),
        ("1", "\udfff", "the input holds a lone surrogate, which has no encoding"),
        ("#" * 262_145, "", "the code has more than 262144 bytes, which is the limit"),
        ("1", "x" * 8_000_001, "the input has more than 8000000 bytes, which is the limit"),
    ],
)
def test_a_request_over_a_limit_is_rejected_and_never_run(box: Sandbox, code: str, stdin: str, reason: str) -> None:
    result = box.run(code, stdin=stdin)
    assert (result.outcome, result.reason) == (RunOutcome.REJECTED, reason)


def test_output_beyond_its_limit_keeps_head_and_tail_and_counts_the_rest(box: Sandbox) -> None:
    result = box.run("print('a' * 100_000, end=''); print('b' * 100_000, end='')")
    assert result.outcome is RunOutcome.STDOUT
    assert result.text == "a" * 32_768 + "\n[... 134464 bytes left out ...]\n" + "b" * 32_768


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.write(1, b'\\xff' * 60_000)",
        "import os\nfor _ in range(40): os.write(1, b'\\xe2\\x82' * 2_000)",
        "print('€' * 60_000)",
        "import sys\nsys.exit('€' * 60_000)",
    ],
    ids=["invalid bytes", "halves of characters", "wide characters", "exit message"],
)
def test_the_limit_of_output_holds_for_the_text_that_is_returned(box: Sandbox, code: str) -> None:
    text = box.run(code).text
    assert 65_000 < len(text.encode()) < 65_536 + 100
    assert "bytes left out" in text


def test_a_flood_of_output_ends_the_program_with_the_same_text_each_time(box: Sandbox) -> None:
    first, second = (box.run("while True: print('flood' * 1000)") for _ in range(2))
    assert (first.outcome, first.reason) == (RunOutcome.KILLED, "output")
    assert first.text == second.text
    assert len(first.text) < 66_000
    assert first.timings.run_s < 4.0


@pytest.mark.parametrize(
    "code",
    [
        "object()",
        "[object(), lambda: 0, type('T', (), {})()]",
        "import random, secrets\nprint(random.random(), random.SystemRandom().random(), secrets.token_hex())",
        "import uuid\nprint(uuid.uuid4())",
        "import numpy\nprint(numpy.random.rand(), numpy.random.default_rng().random())",
        "print({'a', 'b', 'c', 'd'}, hash('text'), id([]))",
        "import os\nprint(os.getpid(), os.getppid(), os.getuid(), os.getcwd(), sorted(os.environ.items()), os.listdir('/'))",
        "import fractions, decimal\nobject()",
    ],
)
def test_the_same_call_gives_the_same_text_whatever_ran_before(box: Sandbox, code: str) -> None:
    first = box.run(code, seed=3).text
    assert "Traceback" not in first
    for other in ("1 / 0", "x = [object() for _ in range(1000)]", "print('x' * 5000)", "import os; os._exit(2)"):
        box.run(other)
        assert box.run(code, seed=3).text == first


def test_another_seed_draws_other_numbers(box: Sandbox) -> None:
    assert box.run("import random\nrandom.random()", seed=1).text != box.run("import random\nrandom.random()", seed=2).text


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        ("print('Execution timed out after 4 s.')", "stdout"),
        ("import os\nfor fd in range(256):\n    try: os.write(fd, b'x\\x01\\0\\0\\0T')\n    except OSError: pass", "stdout"),
        (  # the record itself, found by walking the frames
            "import sys\nf = sys._getframe()\n"
            "while f:\n"
            "    if 'shown' in f.f_locals: f.f_locals['shown'][:5] = b's\\xff\\xff\\xff\\xff'\n"
            "    f = f.f_back",
            "empty",
        ),
    ],
)
def test_a_program_cannot_choose_its_own_class(box: Sandbox, code: str, outcome: str) -> None:
    assert box.run(code).outcome == outcome


def test_a_poisoned_interpreter_ends_with_its_program(box: Sandbox) -> None:
    box.run("import os, traceback, builtins, linecache\nos._exit = traceback.format_exception = builtins.compile = None")
    assert told(box.run("6 * 7")) == ("echo", "42")
    assert "ZeroDivisionError" in box.run("1 / 0").text
