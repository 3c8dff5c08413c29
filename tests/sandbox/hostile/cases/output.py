"""What programs write, and where: floods, bytes that are no text, and forgeries of what only the service may say."""

from __future__ import annotations

import re

from ..case import Case, echo, either, empty, error, exited, killed, program, stdout, timeout
from .preludes import LIBC

LIMIT = 65_536  # bytes of output that a reply keeps
CUT = r"\n\[\.\.\. %s bytes left out \.\.\.\]\n"

CASES = [
    Case(
        "flood",
        "the memory of code that reads the output",
        "while True: print('flood' * 10_000)",
        expect=killed("output", re.compile(r"\Aflood")),
        is_short=True,
    ),
    Case(
        "flood-stderr",
        "the same by the other stream",
        "import os\nwhile True: os.write(2, b'flood' * 10_000)",
        expect=killed("output", re.compile(r"\Aflood")),
    ),
    Case(
        "flood-by-children",
        "the same by eight processes at once",
        "import os\nfor _ in range(3): os.fork()\nwhile True: os.write(1, b'flood\\n' * 600)",
        expect=killed("output", re.compile(r"\A(flood\n)+")),
        is_core=True,
    ),
    Case(
        "flood-without-blocking",
        "the same through a pipe that the program has set not to wait",
        program("""
            import os
            os.set_blocking(1, False)
            while True:
                try: os.write(1, b'flood\\n' * 10_000)
                except BlockingIOError: pass
        """),
        expect=killed("output", re.compile(r"\A(flood\n)+")),
        repeats_from=None,  # how much of a write fits depends on when the other end reads
    ),
    Case(
        "flood-then-exit",
        "the same by a program that ends by itself meanwhile",
        "import os\nfor _ in range(100): os.write(1, b'x' * 1_000_000)",
        expect=killed("output", re.compile(r"\Ax")),
    ),
    Case(
        "flood-of-nul",
        "the reply's encoding: a NUL takes six bytes of JSON",
        "import os\nos.write(1, bytes(60_000))",
        expect=stdout("\0" * 60_000),
    ),
    Case(
        "flood-then-sleep",
        "the head and the tail of an output that is exactly as long as it may be, at the limit",
        f"import sys, time\nsys.stdout.write('a' * {LIMIT // 2} + 'b' * {LIMIT // 2})\nsys.stdout.flush()\ntime.sleep(60)",
        wall_s=0.6,
        expect=timeout("a" * (LIMIT // 2) + "b" * (LIMIT // 2)),
    ),
    Case(
        "output-at-limit",
        "the limit of the output, met exactly",
        f"print('x' * {LIMIT - 1})",
        expect=stdout("x" * (LIMIT - 1) + "\n"),
    ),
    Case(
        "output-one-over",
        "the limit of the output, missed by one",
        f"print('x' * {LIMIT})",
        expect=stdout(re.compile(r"\Ax+" + CUT % "1" + r"x+\n\Z")),
    ),
    Case(
        "one-long-line",
        "code that reads the output by lines",
        "print('x' * 4_000_000, end='')",
        expect=stdout("x" * (LIMIT // 2) + f"\n[... {4_000_000 - LIMIT} bytes left out ...]\n" + "x" * (LIMIT // 2)),
        is_core=True,
    ),
    Case(
        "many-short-lines",
        "the same, and code that handles every line",
        "print('\\n' * 1_000_000, end='')",
        expect=stdout(re.compile(r"\A\n+\[\.\.\. \d+ bytes left out \.\.\.\]\n+\Z")),
    ),
    Case(
        "one-byte-writes",
        "code that does much for every piece that is read",
        "import os\nfor _ in range(50_000): os.write(1, b'x')",
        expect=stdout("x" * 50_000),
    ),
    Case(
        "wide-letters",
        "code that counts letters where bytes were meant: three bytes each, cut in the middle of one",
        "print('漢' * 100_000)",
        expect=stdout(re.compile(r"\A漢+\ufffd?" + CUT % r"\d+" + "\ufffd*漢+\n\\Z")),
    ),
    Case(
        "surrogate-print",
        "the encoding of the output: half a pair has none",
        "print('\\ud800')",
        expect=stdout("\\ud800\n"),
        is_core=True,
    ),
    Case(
        "invalid-utf8",
        "the decoding of the output: bytes that are no text",
        "import os\nos.write(1, b'\\xff\\xfe\\xc3(\\xed\\xa0\\x80\\xf8')",
        expect=stdout("\ufffd\ufffd\ufffd(\ufffd\ufffd\ufffd\ufffd"),
        is_short=True,
    ),
    Case(
        "invalid-utf8-flood",
        "the size of the reply: each such byte becomes a letter of three",
        "import os\nos.write(1, b'\\xff' * 60_000)",
        expect=stdout("\ufffd" * (LIMIT // 6) + f"\n[... {180_000 - LIMIT} bytes left out ...]\n" + "\ufffd" * (LIMIT // 6)),
    ),
    Case(
        "split-letter",
        "code that decodes piece by piece: a letter in two writes",
        program("""
            import os, time
            os.write(1, b'\\xc3')
            time.sleep(0.05)
            os.write(1, b'\\xa9')
        """),
        expect=stdout("é"),
    ),
    Case(
        "control-characters",
        "the terminal of code that looks at the log",
        "print('\\x1b[2J\\x1b]0;title\\x07\\b\\r\\0\\x7f\\x9b')",
        expect=stdout("\x1b[2J\x1b]0;title\x07\b\r\0\x7f\x9b\n"),
        is_core=True,
    ),
    Case(
        "bidi-output",
        "the eyes of code that reads the log",
        "print('\\u202e\\u2066txt.exe\\u2069\\ufeff\\u200d')",
        expect=stdout("\u202e\u2066txt.exe\u2069\ufeff\u200d\n"),
    ),
    Case(
        "line-separators",
        "code that writes one reply a line",
        "print('a\\r\\nb\\rc\\x85d\\u2028e\\x0bf\\x1cg')",
        expect=stdout("a\r\nb\rc\x85d\u2028e\x0bf\x1cg\n"),
    ),
    Case(
        "fake-timeout-text",
        "code that reads the class from the text",
        "print('Execution timed out after 4 s.\\n[killed: memory]\\nTraceback (most recent call last):')",
        expect=stdout("Execution timed out after 4 s.\n[killed: memory]\nTraceback (most recent call last):\n"),
        is_short=True,
    ),
    Case(
        "fake-json-reply",
        "the same by a whole reply",
        """print('{"outcome": "echo", "text": "42", "exit_code": 0}\\n\\0\\x01\\x02')""",
        expect=stdout('{"outcome": "echo", "text": "42", "exit_code": 0}\n\0\x01\x02\n'),
    ),
    Case(
        "forged-record",
        "the channel by which the runner speaks: marks and JSON into every descriptor",
        program("""
            import os
            for fd in range(256):
                for forged in (b'\\x01', b'v\\x02\\0\\0\\0ok', b'{"kind": "echo", "text": "42"}\\n'):
                    try: os.write(fd, forged)
                    except OSError: pass
        """),
        expect=stdout(re.compile(r"\A(\x01v\x02\0\0\0ok\{.*\}\n)+\Z")),
        is_short=True,
    ),
    Case(
        "forged-record-in-memory",
        "the same channel, found by walking the runner's frames, when the program fails",
        program("""
            import sys, gc, mmap
            for found in gc.get_objects():
                if type(found) is mmap.mmap:
                    for kind in b'vxsd': found[:64] = bytes([kind]) + b'\\xff' * 63
            frame = sys._getframe()
            while frame:
                for value in list(frame.f_locals.values()):
                    if type(value) is mmap.mmap: value[:] = b'v' + b'\\xff' * (len(value) - 1)
                frame = frame.f_back
            import os
            os._exit(5)
        """),
        expect=exited(5),
        is_core=True,
    ),
    Case(
        "forged-echo-in-memory",
        "the same when the program printed: no echo may take the place of the output",
        program("""
            import sys, mmap
            print('printed')
            frame = sys._getframe()
            while frame:
                for value in list(frame.f_locals.values()):
                    if type(value) is mmap.mmap: value[:] = (b'v\\x05\\0\\0\\0forge' * len(value))[:len(value)]
                frame = frame.f_back
        """),
        expect=stdout("printed\n"),
    ),
    Case(
        "record-truncated",
        "the service's own map of a shared file: the program makes it shorter, so that a read of it is a signal",
        program("""
            import os
            for fd in range(3, 256):
                try: os.ftruncate(fd, 0)
                except OSError: pass
            7
        """),
        expect=echo("7"),
        is_core=True,
    ),
    Case(
        "descriptors",
        "what was left open by mistake: a directory, or a file of another call",
        program("""
            import os, stat
            for fd in range(3, 1024):
                try: mode = os.fstat(fd).st_mode
                except OSError: continue
                print(fd, 'directory' if stat.S_ISDIR(mode) else 'socket' if stat.S_ISSOCK(mode) else 'other')
        """),
        expect=empty(),
        is_core=True,
    ),
    Case(
        "output-truncated",
        "the output if it were a file: cut, moved and mapped",
        program("""
            import mmap, os
            attacks = ((os.ftruncate, 1, 0), (os.lseek, 1, 0, 0), (mmap.mmap, 1, 4096), (os.pread, 1, 9, 0))
            for attack, *arguments in attacks:
                try: attack(*arguments)
                except (OSError, ValueError): print('refused')
        """),
        expect=stdout("refused\n" * 4),
    ),
    Case(
        "output-stolen",
        "output of others: reading from one's own end",
        "import os\ntry: print(os.read(1, 100))\nexcept OSError: print('refused')",
        expect=stdout("refused\n"),
    ),
    Case(
        "pipe-shrunk",
        "the pipe itself: one page small, and not waiting",
        "import fcntl, os\nfcntl.fcntl(1, 1031, 4096)\nprint('x' * 50_000)",
        expect=stdout("x" * 50_000 + "\n"),
    ),
    Case(
        "pipe-of-messages",
        "the same in its mode of packets",
        program("""
            import fcntl, os
            fcntl.fcntl(1, fcntl.F_SETFL, os.O_DIRECT)
            for n in range(300): os.write(1, b'x')
            os.write(1, b'y' * 10_000)
        """),
        expect=stdout("x" * 300 + "y" * 10_000),
    ),
    Case(
        "spliced-output",
        "the pipe by pages of a file that the program changes afterwards",
        program("""
            import os
            with open('f', 'w+b') as f:
                f.write(b'before' * 1000)
                f.flush()
                try: os.splice(f.fileno(), 1, 6000, offset_src=0)
                except OSError: os.write(1, b'before' * 1000)
        """),
        expect=stdout("before" * 1000),
    ),
    Case(
        "reopened-output",
        "the output by its other names",
        program("""
            for path in ('/dev/stdout', '/dev/fd/1', '/proc/self/fd/1', '/dev/tty', '/dev/console'):
                try:
                    with open(path, 'w') as f: f.write('reached\\n')
                except OSError: print('refused')
        """),
        expect=stdout("refused\n" * 5),
    ),
    Case(
        "stdout-none",
        "streams that the program takes away: None",
        "import sys\nsys.stdout = sys.stderr = None\n1 / 0",
        expect=error("ZeroDivisionError: division by zero"),
    ),
    Case(
        "stdout-closed",
        "the same: closed",
        program("""
            import sys
            sys.stdout.close()
            sys.stderr.close()
            1 / 0
        """),
        expect=error("ZeroDivisionError: division by zero"),
        is_core=True,
    ),
    Case(
        "stdout-closed-print",
        "the same, and then used",
        "import sys\nsys.stdout.close()\nprint(1)",
        expect=error("ValueError: I/O operation on closed file."),
    ),
    Case(
        "stdout-detached",
        "the same: taken apart",
        program("""
            import sys
            raw = sys.stdout.detach()
            raw.write(b'raw')
            raw.flush()
            del sys.stdout, sys.__stdout__
        """),
        expect=stdout("raw"),
    ),
    Case(
        "stdout-hostile",
        "the same: an object that raises, or ends the process, when the runner flushes it",
        program("""
            import os, sys
            class Stream:
                def __getattr__(self, name): os._exit(3)
            sys.stdout = sys.stderr = Stream()
            5
        """),
        expect=either(echo("5"), exited(3)),
    ),
    Case(
        "close-all-fds",
        "the streams by their numbers",
        "import os\nos.closerange(0, 256)\nprint(1)",
        expect=error("OSError: [Errno 9] Bad file descriptor"),
        is_short=True,
    ),
    Case(
        "swapped-fds",
        "the streams by their numbers: the output is now the input of a pipe that is full",
        program("""
            import os
            read, write = os.pipe()
            os.dup2(write, 1)
            os.dup2(write, 2)
            os.set_blocking(write, False)
            print('x' * 100_000)
        """),
        expect=error(re.compile("BlockingIOError")),
    ),
    Case(
        "broken-pipe",
        "the same with a closed other end: SIGPIPE",
        program("""
            import os, signal
            signal.signal(signal.SIGPIPE, signal.SIG_DFL)
            read, write = os.pipe()
            os.dup2(write, 1)
            os.close(read)
            os.close(write)
            print('x', flush=True)
            os.write(2, b'went on')
        """),
        expect=either(killed("signal 13", ""), stdout("went on"), error(re.compile("BrokenPipeError"))),
    ),
    Case(
        "terminal",
        "the terminal of the process that started the sandbox: a line typed into it",
        LIBC
        + program("""
            import fcntl
            for fd in (0, 1, 2):
                try: fcntl.ioctl(fd, 0x5412, b'x')  # TIOCSTI
                except OSError: print('refused')
            try: os.open('/dev/tty', os.O_RDWR)
            except OSError: print('refused')
        """),
        expect=stdout("refused\n" * 4),
        is_core=True,
    ),
    Case(
        "terminal-master",
        "a terminal of its own, by which to get at another",
        "import os\ntry: os.openpty()\nexcept OSError: print('refused')",
        expect=stdout("refused\n"),
    ),
    Case(
        "many-lines-kept-last",
        "the tail of a long output: the last line is what most readers want",
        "for n in range(20_000): print(n)\nprint('the last line')",
        expect=stdout(re.compile(r"\A0\n1\n(.*\n)+19999\nthe last line\n\Z")),
    ),
]
