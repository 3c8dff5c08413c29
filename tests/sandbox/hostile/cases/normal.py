"""Honest programs at the edges of what is normal: what they print, read and show must be reported exactly."""

from __future__ import annotations

import re

from ..case import NO_SEMAPHORES, Case, echo, empty, error, exited, program, rejected, stdout

CASES = [
    Case("echo-semicolon", "the echo rule: a semicolon silences the value, as in IPython", "5;", expect=empty()),
    Case(
        "echo-multi-line",
        "the echo rule: the last expression spans lines and a comment follows",
        program("""
            (1,
              2,
             3)
            # done
        """),
        expect=echo("(1, 2, 3)"),
    ),
    Case(
        "echo-unicode",
        "the way of a repr to the reply: a letter of two bytes and an escape",
        r"'é\n'",
        expect=echo(r"'é\n'"),
        is_short=True,
    ),
    Case("empty-program", "a program of no bytes", "", expect=empty(), is_core=True),
    Case("only-comments", "a program without a statement", "# one\n# two", expect=empty()),
    Case("only-whitespace", "a program without a token", " \n\t\n\f\n  ", expect=empty()),
    Case("only-bom", "a program that is a byte order mark", "\ufeff", expect=empty()),
    Case(
        "stdin-lines",
        "input that ends without a newline",
        "print(int(input()) + int(input()))",
        stdin="3\n4",
        expect=stdout("7\n"),
        is_core=True,
    ),
    Case(
        "stdin-eof",
        "the wait for input that never comes",
        "input()",
        expect=error("EOFError: EOF when reading a line"),
        is_short=True,
    ),
    Case(
        "stdin-unread",
        "a supervisor that waits until its input was taken",
        "print('not read')",
        stdin="x" * 5_000_000,
        expect=stdout("not read\n"),
    ),
    Case(
        "stdin-large",
        "input as large as it may be",
        "import sys\nprint(len(sys.stdin.read()))",
        stdin="x" * 8_000_000,
        expect=stdout("8000000\n"),
    ),
    Case("stdin-over-limit", "input larger than it may be", "1", stdin="x" * 8_000_001, expect=rejected()),
    Case(
        "stdin-twice",
        "input that is a file: read, rewound and read again",
        program("""
            import sys, os
            print(sys.stdin.read())
            os.lseek(0, 0, 0)
            print(os.read(0, 9))
        """),
        stdin="once",
        expect=stdout("once\nb'once'\n"),
    ),
    Case(
        "stdin-overwritten",
        "input that is a file: written to, so that the next call might read it",
        program("""
            import os
            try: os.write(0, b'planted' * 100)
            except OSError: pass
            print('tried')
        """),
        stdin="mine",
        expect=stdout("tried\n"),
    ),
    Case(
        "stdin-closed",
        "input that was closed and is asked for",
        "import sys\nsys.stdin.close()\ninput()",
        expect=error("ValueError: I/O operation on closed file."),
    ),
    Case(
        "stdin-not-text",
        "the decoding of input: NUL, CR, U+2028 and a letter outside the BMP",
        "import sys\nprint(ascii(sys.stdin.read()))",
        stdin="a\0b\rc\u2028\U0001f600",
        expect=stdout("'a\\x00b\\nc\\u2028\\U0001f600'\n"),
    ),
    Case(
        "main-guard",
        "programs that ask whether they are the main one",
        "if __name__ == '__main__': print('main')",
        expect=stdout("main\n"),
    ),
    Case(
        "future-import",
        "line numbers: nothing may be put before the first line",
        "from __future__ import annotations\n\n1 / 0",
        expect=error(re.compile(r'File "<code>", line 3, in <module>\n(.*\n)*ZeroDivisionError: division by zero\n\Z')),
    ),
    Case(
        "rng-independence",
        "generators that a forked process inherits: the draws of one call differ, those of equal calls do not",
        "import random, numpy as np\nprint(len({np.random.rand(), np.random.rand(), random.random(), random.random()}))\n"
        "print(np.random.rand(), random.random(), np.random.default_rng().random())",
        expect=stdout(re.compile(r"\A4\n")),
        is_core=True,
    ),
    Case(
        "asyncio",
        "a rule against sockets that forbids the pair an event loop needs",
        "import asyncio\nasyncio.run(asyncio.sleep(0.01))\nprint('slept')",
        expect=stdout("slept\n"),
        is_short=True,
    ),
    Case(
        "threads-ok",
        "a limit on processes that honest threads meet",
        program("""
            import threading
            threads = [threading.Thread(target=print, args=(n,)) for n in range(4)]
            for t in threads:
                t.start()
                t.join()
        """),
        expect=stdout("0\n1\n2\n3\n"),
    ),
    Case(
        "process-pool",
        "rules against semaphores, sockets and forks that honest pools meet",
        program("""
            from concurrent.futures import ProcessPoolExecutor
            with ProcessPoolExecutor(2) as pool: print(list(pool.map(abs, [-1, 2])))
        """),
        expect=stdout("[1, 2]\n"),
        at=NO_SEMAPHORES,
        is_core=True,
    ),
    Case(
        "multiprocessing-queue",
        "the same for a pipe, a feeder thread and a lock shared with a child",
        program("""
            import multiprocessing as mp
            def work(queue): queue.put(sum(range(10)))
            queue = mp.Queue()
            child = mp.Process(target=work, args=(queue,))
            child.start()
            print(queue.get(), child.join(), child.exitcode)
        """),
        expect=stdout("45 None 0\n"),
        at=NO_SEMAPHORES,
    ),
    Case(
        "stderr-only",
        "the echo rule: what goes to stderr was printed, too",
        "import sys\nprint('careful', file=sys.stderr)\n5",
        expect=stdout("careful\n"),
        is_core=True,
    ),
    Case(
        "streams-interleaved",
        "the order of two streams, one of them raw",
        program("""
            import os, sys
            for n in range(3):
                print('out', n)
                print('err', n, file=sys.stderr)
                os.write(1, b'raw\\n')
        """),
        expect=stdout("".join(f"out {n}\nerr {n}\nraw\n" for n in range(3))),
    ),
    Case(
        "warnings",
        "text that a library writes about the program, which may name places of the runner",
        "import numpy as np\nprint(np.log(np.zeros(1)))",
        expect=stdout(re.compile(r"\A<code>:2: RuntimeWarning: divide by zero encountered in log\n.*\n?\[-inf\]\n\Z")),
    ),
    Case(
        "subprocess-shell",
        "the execution of the system's own programs",
        program("""
            import subprocess
            print(subprocess.run('echo $((6 * 7)) | cat', shell=True, capture_output=True, text=True).stdout)
        """),
        expect=stdout("42\n\n"),
    ),
    Case(
        "subprocess-python",
        "the start of another interpreter where this one runs",
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'print(6 * 7)'])",
        expect=stdout("42\n"),
        is_core=True,
    ),
    Case(
        "exec-python",
        "the wait for a process that has become another program",
        "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(input())'])",
        stdin="still mine",
        expect=stdout("still mine\n"),
    ),
    Case(
        "exec-shell",
        "the same, with an end that the other program chooses",
        "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 3'])",
        expect=exited(3),
    ),
    Case(
        "tempfile",
        "places for temporary files: there must be one, and it must be the call's own",
        program("""
            import tempfile, pathlib
            with tempfile.TemporaryDirectory() as d:
                p = pathlib.Path(d, 'x')
                p.write_text('kept')
                print(p.read_text())
        """),
        expect=stdout("kept\n"),
        is_core=True,
    ),
    Case(
        "files-in-home",
        "the same for the working and the home directory",
        program("""
            import os
            for place in ('.', os.path.expanduser('~')):
                open(f'{place}/a', 'w').write('b')
                print(open(f'{place}/a').read())
        """),
        expect=stdout("b\nb\n"),
        is_core=True,
    ),
    Case(
        "pickle-own-class",
        "a main module that exists, where pickle looks for the class",
        program("""
            import pickle
            class C:
                x = 5
            print(pickle.loads(pickle.dumps(C())).x)
        """),
        expect=stdout("5\n"),
    ),
    Case(
        "inspect-own-source",
        "source that exists in no file",
        program("""
            import inspect
            def f():
                return 1
            print(inspect.getsource(f), end='')
        """),
        expect=stdout("def f():\n    return 1\n"),
    ),
    Case(
        "signal-handler-ok",
        "rules against timers and signals that honest programs meet",
        program("""
            import signal
            signal.signal(signal.SIGALRM, lambda *_: print('rang'))
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            signal.pause()
        """),
        expect=stdout("rang\n"),
        is_core=True,
    ),
    Case(
        "line-endings",
        "the splitting of source: CRLF, a lone CR, a form feed and no last newline",
        "x = 1\r\ny = 2\rz = 3\n\x0cx + y + z",
        expect=echo("6"),
    ),
    Case(
        "encoding-comment",
        "source that claims another encoding than it has",
        "# -*- coding: latin-1 -*-\nprint('é')",
        expect=stdout("é\n"),
    ),
    Case(
        "bidi-source",
        "letters that turn the direction of text, in names and in output",
        "ﬁ = '\u202e' + 'abc'\nprint(fi)",  # the name is normalised
        expect=stdout("\u202eabc\n"),
    ),
    Case("large-source", "a program almost as large as it may be", "#" * 262_000 + "\n1 + 1", expect=echo("2")),
    Case("source-over-limit", "a program larger than it may be", "#" * 262_145, expect=rejected()),
    Case("many-lines", "what the compiler makes of twenty thousand statements", "x = 1\n" * 20_000 + "x", expect=echo("1")),
    Case(
        "redirected-stdout",
        "the echo rule: what was printed into a string was not printed",
        program("""
            import contextlib, io
            with contextlib.redirect_stdout(io.StringIO()) as caught: print('hidden')
            caught.getvalue()
        """),
        expect=echo(r"'hidden\n'"),
    ),
    Case(
        "unprinted-buffer",
        "output that is still in a buffer at the end",
        program("""
            import sys
            out = open(1, 'w', buffering=1 << 20, closefd=False)
            out.write('late')
            import atexit
            atexit.register(out.flush)
        """),
        expect=stdout("late"),
    ),
    Case(
        "deterministic-objects",
        "addresses, hashes and process ids in what is shown",
        program("""
            import os
            print(object(), hash('text'), {'a', 'b', 'c'}, id([]), lambda: 0)
            os.urandom(4).hex(), os.getpid() < 10**9
        """),
        expect=stdout(re.compile(r"\A<object object at 0x[0-9a-f]+> ")),
        is_core=True,
    ),
]
