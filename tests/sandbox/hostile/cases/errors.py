"""Errors, real and forged: the reply holds a traceback of the program, whatever the exception does when it is looked at."""

from __future__ import annotations

import re

from ..case import NO_SEMAPHORES, Case, echo, either, empty, error, exited, killed, program, rejected, stdout, timeout

CASES = [
    Case(
        "tabs-and-spaces",
        "the compiler's own errors",
        "if True:\n        a = 1\n\tb = 2",
        expect=error("TabError: inconsistent use of tabs and spaces in indentation"),
        is_short=True,
    ),
    Case("surrogate-in-code", "the encoding of the request: half a pair has none", "'\ud800'", expect=rejected()),
    Case("surrogate-in-stdin", "the same in the input", "1", stdin="\udfff", expect=rejected()),
    Case("nul-in-code", "C strings that end at a NUL", "print(1)\0print(2)", expect=rejected()),
    Case(
        "deep-parens-eval",
        "the parser's stack",
        "eval('(' * 300 + ')' * 300)",
        expect=error("SyntaxError: too many nested parentheses"),
    ),
    Case(
        "deep-parens-source",
        "the parser's stack, in the program itself",
        "(" * 5_000 + "1" + ")" * 5_000,
        expect=error(re.compile(r"(SyntaxError: too many nested parentheses|MemoryError)\n")),
    ),
    Case(
        "deep-operators",
        "the recursion of the compiler over a tree as deep as the source is long",
        "-" * 200_000 + "1",
        expect=error(re.compile(r"(MemoryError|RecursionError: .*|SyntaxError: .*)\n")),
    ),
    Case(
        "long-sum",
        "the recursion of the compiler over a left-leaning tree",
        "1" + "+1" * 100_000,
        expect=error(re.compile(r"(MemoryError|RecursionError: .*)\n")),
    ),
    Case(
        "recursion",
        "a traceback of a thousand frames",
        "def f(n): return f(n + 1)\nf(0)",
        expect=error(
            re.compile(r"Previous line repeated \d+ more times.*\nRecursionError: maximum recursion depth exceeded", re.S)
        ),
        is_short=True,
    ),
    Case(
        "recursion-no-limit",
        "a stack without a bound but memory",
        program("""
            import sys
            sys.setrecursionlimit(10**9)
            def f(n): return f(n + 1)
            f(0)
        """),
        memory_mib=128,
        expect=either(error(re.compile(r"\n(MemoryError|RecursionError.*|SystemError.*)\n\Z")), killed("signal 11")),
    ),
    Case(
        "recursion-in-c",
        "the C stack, which Python's limit does not see",
        program("""
            import sys
            sys.setrecursionlimit(10**9)
            class C:
                def __repr__(self): return repr([self])
            repr(C())
        """),
        memory_mib=128,
        expect=either(error(re.compile(r"(MemoryError|RecursionError)")), killed("signal 11")),
    ),
    Case(
        "deep-del",
        "the recursion of deallocation",
        program("""
            x = None
            for _ in range(1_000_000): x = [x]
            x = None
            print('freed')
        """),
        expect=stdout("freed\n"),
    ),
    Case(
        "int-digits",
        "the quadratic conversion of a large number",
        "print(10 ** 200_000)",
        expect=error(re.compile(r"ValueError: Exceeds the limit \(4300 digits\)")),
    ),
    Case(
        "int-digits-off",
        "the same with Python's own guard off",
        "import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(10 ** 200_000)))",
        expect=stdout("200001\n"),
    ),
    Case(
        "int-echo-huge", "a value whose repr raises", "10 ** 5000", expect=error(re.compile(r"ValueError: Exceeds the limit"))
    ),
    Case(
        "exc-str-raises",
        "the formatting of an exception whose text raises",
        "class E(Exception):\n    def __str__(self): raise ValueError('no text')\nraise E",
        expect=error(re.compile(r"E: <exception str\(\) failed>\n")),
        is_short=True,
    ),
    Case(
        "exc-str-loops",
        "the same for a text that is never ready",
        program("""
            class E(Exception):
                def __str__(self):
                    while True: pass
            raise E
        """),
        wall_s=0.4,
        expect=timeout(""),
    ),
    Case(
        "exc-str-huge",
        "the same for a text of a gigabyte",
        "class E(Exception):\n    def __str__(self): return 'x' * (1 << 30)\nraise E",
        expect=error(re.compile("E")),
    ),
    Case(
        "exc-str-large",
        "the same for a text that fits into memory but into no reply",
        "raise ValueError('x' * 10_000_000)",
        expect=error(re.compile(r"ValueError: x+\n\[\.\.\. \d+ characters left out \.\.\.\]\nx+\n\Z")),
    ),
    Case(
        "exc-str-exits",
        "the same for a text that ends the process",
        program("""
            import os
            class E(Exception):
                def __str__(self): os._exit(0)
            raise E
        """),
        expect=either(empty(), error(re.compile("E"))),
    ),
    Case(
        "exc-name-huge",
        "the name of an exception",
        "raise type('E' * 1_000_000, (Exception,), {})('text')",
        expect=error(re.compile(r"EEE\n\[\.\.\. \d+ characters left out")),
    ),
    Case(
        "exc-name-odd",
        "a class that lies about its name and its module",
        program("""
            class M(type):
                __module__ = __qualname__ = property(lambda c: 1 / 0)
            class E(Exception, metaclass=M): pass
            raise E('text')
        """),
        expect=error(re.compile(r"E")),
    ),
    Case(
        "exc-notes-bomb",
        "notes: fifty thousand of them, and some that are no text",
        "e = ValueError('noted')\ne.__notes__ = ['n'] * 50_000 + [5, None]\nraise e",
        expect=error(re.compile(r"ValueError: noted\n(n\n)+\n?\[\.\.\. ")),
    ),
    Case(
        "exc-cause-cycle",
        "the walk along causes that bite their tail",
        "a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        expect=error(re.compile(r"ValueError: ")),
    ),
    Case(
        "exc-chain",
        "the walk along ten thousand causes",
        program("""
            e = None
            for n in range(10_000):
                new = ValueError(n)
                new.__cause__, e = e, new
            raise e
        """),
        expect=error(re.compile(r"(ValueError: 9999\n\Z|cannot be shown)")),
    ),
    Case(
        "exc-group",
        "the formatting of groups within groups",
        program("""
            g = ExceptionGroup('leaf', [ValueError(n) for n in range(3)])
            for n in range(4): g = ExceptionGroup(f'level {n}', [g, g])
            raise g
        """),
        expect=error(re.compile(r"ExceptionGroup: level 3 \(2 sub-exceptions\)\n(.*\n)*.*ValueError: 0\n")),
    ),
    Case(
        "exc-group-bomb",
        "the same, where every level doubles the text",
        program("""
            g = ExceptionGroup('leaf', [ValueError(n) for n in range(50)])
            for n in range(30): g = ExceptionGroup(f'level {n}', [g, g])
            raise g
        """),
        wall_s=1.0,
        expect=either(error(re.compile("ExceptionGroup")), timeout("")),
    ),
    Case(
        "exc-other-bases",
        "handlers that catch `Exception` only",
        "class Stop(BaseException): pass\nraise Stop('beyond Exception')",
        expect=error("Stop: beyond Exception"),
    ),
    Case(
        "exc-surrogate",
        "the encoding of an error's text",
        "raise ValueError('\\ud800 \\0 \\x1b[2J')",
        expect=error("ValueError: \\ud800 \0 \x1b[2J"),
    ),
    Case(
        "exc-traceback-forged",
        "a traceback with a loop in it",
        program("""
            try: 1 / 0
            except ZeroDivisionError as e: saved = e
            tb = saved.__traceback__
            try: tb.tb_next = tb
            except ValueError: print('no loop')
            raise saved.with_traceback(tb)
        """),
        expect=error("ZeroDivisionError: division by zero"),
    ),
    Case(
        "exc-source-of-host",
        "the lines that a traceback quotes, from a file of the attacker's choice",
        "exec(compile('\\n1 / 0', HOST_SECRET_FILE, 'exec'))",
        expect=error("ZeroDivisionError: division by zero"),
        is_core=True,
    ),
    Case(
        "exc-syntax-forged",
        "a syntax error that names a file of the host, and places that do not exist",
        "raise SyntaxError('forged', (HOST_SECRET_FILE, 1, -7, None, 10**9, -1))",
        expect=error(re.compile(r"SyntaxError: forged")),
    ),
    Case(
        "exc-loader-forged",
        "the same by a loader that answers for a module's source with something that is none",
        program("""
            class Loader:
                def get_source(self, name): return 'x' * (1 << 40)
            exec(compile('1 / 0', 'nowhere', 'exec'), {'__name__': 'm', '__loader__': Loader()})
        """),
        expect=error(re.compile("ZeroDivisionError")),
    ),
    Case(
        "long-line-quoted",
        "the quoting of a line as long as a program may be",
        "x = '" + "a" * 260_000 + "'; 1 / 0",
        expect=error("ZeroDivisionError: division by zero"),
    ),
    Case(
        "thread-error",
        "the traceback that a thread prints by itself, which may name places of the runner",
        program("""
            import threading
            t = threading.Thread(target=lambda: 1 / 0)
            t.start()
            t.join()
        """),
        expect=stdout(re.compile(r"ZeroDivisionError: division by zero\n\Z")),
        needs="neutral paths in what libraries print",
    ),
    Case(
        "pool-error",
        "the same for a traceback that came from another process",
        program("""
            from concurrent.futures import ProcessPoolExecutor
            def f(x): return 1 / x
            with ProcessPoolExecutor(1) as pool: list(pool.map(f, [0]))
        """),
        expect=error("ZeroDivisionError: division by zero"),
        at=NO_SEMAPHORES,
        needs="neutral paths in what libraries print",
    ),
    Case(
        "printed-traceback",
        "the same for one that the program prints",
        "import traceback, json\ntry: json.loads('{')\nexcept ValueError: traceback.print_exc()",
        expect=stdout(re.compile(r"JSONDecodeError: ")),
        needs="neutral paths in what libraries print",
    ),
    Case(
        "del-error",
        "an exception that no handler can catch",
        program("""
            class C:
                def __del__(self): 1 / 0
            C()
            print('on')
        """),
        expect=stdout(re.compile(r"Exception ignored in(.*\n)*.*ZeroDivisionError: division by zero\non\n\Z")),
    ),
    Case(
        "atexit-error",
        "an error after the last line",
        "import atexit\natexit.register(lambda: 1 / 0)\nprint('end')",
        expect=either(
            error(re.compile("ZeroDivisionError")), stdout(re.compile(r"\Aend\n(.*\n)*ZeroDivisionError: division by zero\n"))
        ),
    ),
    Case(
        "last-value-generator",
        "the echo of a value that cannot be copied out",
        "(n for n in range(3))",
        expect=echo(re.compile(r"\A<generator object <genexpr> at 0x[0-9a-f]+>\Z")),
    ),
    Case(
        "last-value-module",
        "the echo of a module, whose repr names its file",
        "import json\njson",
        expect=echo(re.compile(r"\A<module 'json'")),
        needs="neutral paths in what libraries print",
    ),
    Case(
        "last-value-array",
        "the echo of ten million numbers",
        "import numpy as np\nnp.arange(10_000_000)",
        expect=echo(re.compile(r"\Aarray\(\[\s*0,\s+1,\s+2, \.\.\.")),
    ),
    Case(
        "last-value-huge",
        "the echo of a value whose repr has thirty million characters",
        "['x' * 30_000_000]",
        expect=echo(re.compile(r"\A\['x+\n\[\.\.\. \d+ (characters|bytes) left out \.\.\.\]\nx+'\]\Z")),
    ),
    Case(
        "repr-raises",
        "the echo of a value that does not want to be seen",
        "class C:\n    def __repr__(self): raise KeyError('hidden')\nC()",
        expect=error("KeyError: 'hidden'"),
        is_short=True,
    ),
    Case(
        "repr-loops",
        "the same, forever",
        program("""
            class C:
                def __repr__(self):
                    while True: pass
            C()
        """),
        wall_s=0.4,
        expect=timeout(""),
    ),
    Case(
        "repr-no-text",
        "a repr that is no text",
        "class C:\n    def __repr__(self): return 5\nC()",
        expect=error("TypeError: __repr__ returned non-string (type int)"),
    ),
    Case(
        "repr-text-subclass",
        "a repr whose text lies about its length and its encoding",
        program("""
            class S(str):
                def __len__(self): return -1
                def encode(self, *_): return b'x' * (1 << 30)
                def __getitem__(self, _): return self
            class C:
                def __repr__(self): return S('text')
            C()
        """),
        expect=either(echo("text"), error(re.compile("Error"))),
    ),
    Case(
        "repr-self",
        "a value that contains itself, by a class of its own",
        program("""
            class L(list):
                def __repr__(self): return f'<{self[0]!r}>'
            x = L()
            x.append(x)
            x
        """),
        expect=error(re.compile("RecursionError")),
    ),
    Case(
        "repr-prints",
        "the echo rule: output made by the echo itself",
        program("""
            class C:
                def __repr__(self):
                    print('from repr')
                    return 'value'
            C()
        """),
        expect=stdout("from repr\n"),
    ),
    Case(
        "repr-exits",
        "a process that ends within its echo",
        program("""
            import os
            class C:
                def __repr__(self): os._exit(9)
            C()
        """),
        expect=exited(9),
    ),
    Case(
        "none-in-disguise",
        "the test whether there is a value: one that claims to equal everything",
        program("""
            class C:
                def __eq__(self, _): return True
                def __bool__(self): raise ValueError
                def __repr__(self): return 'here'
            C()
        """),
        expect=echo("here"),
    ),
    Case(
        "exit-code-huge",
        "exit codes that fit into no byte",
        "raise SystemExit(2**70 + 5)",
        expect=error(re.compile(r"The program exited with code \d+\.\n")),
    ),
    Case("exit-code-negative", "the same below zero", "import os\nos._exit(-1)", expect=exited(255)),
    Case(
        "exit-code-object",
        "an exit whose code loops when it is shown",
        program("""
            class C:
                def __str__(self):
                    while True: pass
            raise SystemExit(C())
        """),
        wall_s=0.4,
        expect=timeout(""),
    ),
    Case(
        "exit-code-property",
        "an exit whose code is a trap",
        "class E(SystemExit):\n    code = property(lambda self: 1 / 0)\nraise E",
        expect=error(re.compile("E|exited")),
    ),
    Case(
        "exit-text",
        "an exit that says why, with half a pair",
        "import sys\nsys.exit('enough \\ud800')",
        expect=error(re.compile(r"\Aenough \\ud800\n")),
    ),
    Case("exit-quietly", "an end that skips everything", "print('lost', end='')\nimport os\nos._exit(0)", expect=empty()),
]
