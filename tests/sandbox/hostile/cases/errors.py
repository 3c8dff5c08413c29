"""Errors, real and forged: the reply holds a traceback of the program, whatever the exception does when it is looked at."""

from __future__ import annotations

import re

from ..case import NO_SEMAPHORES, Case, echo, either, empty, error, exited, killed, program, rejected, stdout, timeout

CASES = [
    Case(
        name="tabs-and-spaces",
        attacks="the compiler's own errors",
        code="if True:\n        a = 1\n\tb = 2",
        expect=error("TabError: inconsistent use of tabs and spaces in indentation"),
        is_short=True,
    ),
    Case(
        name="surrogate-in-code",
        attacks="the encoding of the request: half a pair has none",
        code="'\ud800'",
        expect=rejected(),
    ),
    Case(name="surrogate-in-stdin", attacks="the same in the input", code="1", stdin="\udfff", expect=rejected()),
    Case(name="nul-in-code", attacks="C strings that end at a NUL", code="print(1)\0print(2)", expect=rejected()),
    Case(
        name="deep-parens-eval",
        attacks="the parser's stack",
        code="eval('(' * 300 + ')' * 300)",
        expect=error("SyntaxError: too many nested parentheses"),
    ),
    Case(
        name="deep-parens-source",
        attacks="the parser's stack, in the program itself",
        code="(" * 5_000 + "1" + ")" * 5_000,
        expect=error(re.compile(r"(SyntaxError: too many nested parentheses|MemoryError)\n")),
    ),
    Case(
        name="deep-operators",
        attacks="the recursion of the compiler over a tree as deep as the source is long",
        code="-" * 200_000 + "1",
        expect=error(re.compile(r"(MemoryError|RecursionError: .*|SyntaxError: .*)\n")),
    ),
    Case(
        name="long-sum",
        attacks="the recursion of the compiler over a left-leaning tree",
        code="1" + "+1" * 100_000,
        expect=error(re.compile(r"(MemoryError|RecursionError: .*)\n")),
    ),
    Case(
        name="recursion",
        attacks="a traceback of a thousand frames",
        code="def f(n): return f(n + 1)\nf(0)",
        expect=error(
            re.compile(r"Previous line repeated \d+ more times.*\nRecursionError: maximum recursion depth exceeded", re.S)
        ),
        is_short=True,
    ),
    Case(
        name="recursion-no-limit",
        attacks="a stack without a bound but memory",
        code=program("""
            import sys
            sys.setrecursionlimit(10**9)
            def f(n): return f(n + 1)
            f(0)
        """),
        memory_mib=128,
        expect=either(error(re.compile(r"\n(MemoryError|RecursionError.*|SystemError.*)\n\Z")), killed("signal 11")),
    ),
    Case(
        name="recursion-in-c",
        attacks="the C stack, which Python's limit does not see",
        code=program("""
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
        name="deep-del",
        attacks="the recursion of deallocation",
        code=program("""
            x = None
            for _ in range(1_000_000): x = [x]
            x = None
            print('freed')
        """),
        expect=stdout("freed\n"),
    ),
    Case(
        name="int-digits",
        attacks="the quadratic conversion of a large number",
        code="print(10 ** 200_000)",
        expect=error(re.compile(r"ValueError: Exceeds the limit \(4300 digits\)")),
    ),
    Case(
        name="int-digits-off",
        attacks="the same with Python's own guard off",
        code="import sys\nsys.set_int_max_str_digits(0)\nprint(len(str(10 ** 200_000)))",
        expect=stdout("200001\n"),
    ),
    Case(
        name="int-echo-huge",
        attacks="a value whose repr raises",
        code="10 ** 5000",
        expect=error(re.compile(r"ValueError: Exceeds the limit")),
    ),
    Case(
        name="exc-str-raises",
        attacks="the formatting of an exception whose text raises",
        code="class E(Exception):\n    def __str__(self): raise ValueError('no text')\nraise E",
        expect=error(re.compile(r"E: <exception str\(\) failed>\n")),
        is_short=True,
    ),
    Case(
        name="exc-str-loops",
        attacks="the same for a text that is never ready",
        code=program("""
            class E(Exception):
                def __str__(self):
                    while True: pass
            raise E
        """),
        wall_s=0.4,
        expect=timeout(""),
    ),
    Case(
        name="exc-str-huge",
        attacks="the same for a text of a gigabyte",
        code="class E(Exception):\n    def __str__(self): return 'x' * (1 << 30)\nraise E",
        expect=error(re.compile("E")),
    ),
    Case(
        name="exc-str-large",
        attacks="the same for a text that fits into memory but into no reply",
        code="raise ValueError('x' * 10_000_000)",
        expect=error(re.compile(r"ValueError: x+\n\[\.\.\. \d+ characters left out \.\.\.\]\nx+\n\Z")),
    ),
    Case(
        name="exc-str-exits",
        attacks="the same for a text that ends the process",
        code=program("""
            import os
            class E(Exception):
                def __str__(self): os._exit(0)
            raise E
        """),
        expect=either(empty(), error(re.compile("E"))),
    ),
    Case(
        name="exc-name-huge",
        attacks="the name of an exception",
        code="raise type('E' * 1_000_000, (Exception,), {})('text')",
        expect=error(re.compile(r"EEE\n\[\.\.\. \d+ characters left out")),
    ),
    Case(
        name="exc-name-odd",
        attacks="a class that lies about its name and its module",
        code=program("""
            class M(type):
                __module__ = __qualname__ = property(lambda c: 1 / 0)
            class E(Exception, metaclass=M): pass
            raise E('text')
        """),
        expect=error(re.compile(r"E")),
    ),
    Case(
        name="exc-notes-bomb",
        attacks="notes: fifty thousand of them, and some that are no text",
        code="e = ValueError('noted')\ne.__notes__ = ['n'] * 50_000 + [5, None]\nraise e",
        expect=error(re.compile(r"ValueError: noted\n(n\n)+\n?\[\.\.\. ")),
    ),
    Case(
        name="exc-cause-cycle",
        attacks="the walk along causes that bite their tail",
        code="a, b = ValueError('a'), ValueError('b')\na.__cause__, b.__cause__ = b, a\nraise a",
        expect=error(re.compile(r"ValueError: ")),
    ),
    Case(
        name="exc-chain",
        attacks="the walk along ten thousand causes",
        code=program("""
            e = None
            for n in range(10_000):
                new = ValueError(n)
                new.__cause__, e = e, new
            raise e
        """),
        expect=error(re.compile(r"(ValueError: 9999\n\Z|cannot be shown)")),
    ),
    Case(
        name="exc-group",
        attacks="the formatting of groups within groups",
        code=program("""
            g = ExceptionGroup('leaf', [ValueError(n) for n in range(3)])
            for n in range(4): g = ExceptionGroup(f'level {n}', [g, g])
            raise g
        """),
        expect=error(re.compile(r"ExceptionGroup: level 3 \(2 sub-exceptions\)\n(.*\n)*.*ValueError: 0\n")),
    ),
    Case(
        name="exc-group-bomb",
        attacks="the same, where every level doubles the text",
        code=program("""
            g = ExceptionGroup('leaf', [ValueError(n) for n in range(50)])
            for n in range(30): g = ExceptionGroup(f'level {n}', [g, g])
            raise g
        """),
        wall_s=1.0,
        expect=either(error(re.compile("ExceptionGroup")), timeout("")),
    ),
    Case(
        name="exc-other-bases",
        attacks="handlers that catch `Exception` only",
        code="class Stop(BaseException): pass\nraise Stop('beyond Exception')",
        expect=error("Stop: beyond Exception"),
    ),
    Case(
        name="exc-surrogate",
        attacks="the encoding of an error's text",
        code="raise ValueError('\\ud800 \\0 \\x1b[2J')",
        expect=error("ValueError: \\ud800 \0 \x1b[2J"),
    ),
    Case(
        name="exc-traceback-forged",
        attacks="a traceback with a loop in it",
        code=program("""
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
        name="exc-source-of-host",
        attacks="the lines that a traceback quotes, from a file of the attacker's choice",
        code="exec(compile('\\n1 / 0', HOST_SECRET_FILE, 'exec'))",
        expect=error("ZeroDivisionError: division by zero"),
        is_core=True,
    ),
    Case(
        name="exc-syntax-forged",
        attacks="a syntax error that names a file of the host, and places that do not exist",
        code="raise SyntaxError('forged', (HOST_SECRET_FILE, 1, -7, None, 10**9, -1))",
        expect=error(re.compile(r"SyntaxError: forged")),
    ),
    Case(
        name="exc-loader-forged",
        attacks="the same by a loader that answers for a module's source with something that is none",
        code=program("""
            class Loader:
                def get_source(self, name): return 'x' * (1 << 40)
            exec(compile('1 / 0', 'nowhere', 'exec'), {'__name__': 'm', '__loader__': Loader()})
        """),
        expect=error(re.compile("ZeroDivisionError")),
    ),
    Case(
        name="long-line-quoted",
        attacks="the quoting of a line as long as a program may be",
        code="x = '" + "a" * 260_000 + "'; 1 / 0",
        expect=error("ZeroDivisionError: division by zero"),
    ),
    Case(
        name="thread-error",
        attacks="the traceback that a thread prints by itself, which may name places of the runner",
        code=program("""
            import threading
            t = threading.Thread(target=lambda: 1 / 0)
            t.start()
            t.join()
        """),
        expect=stdout(re.compile(r"ZeroDivisionError: division by zero\n\Z")),
        needs="neutral paths in what libraries print",
    ),
    Case(
        name="pool-error",
        attacks="the same for a traceback that came from another process",
        code=program("""
            from concurrent.futures import ProcessPoolExecutor
            def f(x): return 1 / x
            with ProcessPoolExecutor(1) as pool: list(pool.map(f, [0]))
        """),
        expect=error("ZeroDivisionError: division by zero"),
        at=NO_SEMAPHORES,
        needs="neutral paths in what libraries print",
    ),
    Case(
        name="printed-traceback",
        attacks="the same for one that the program prints",
        code="import traceback, json\ntry: json.loads('{')\nexcept ValueError: traceback.print_exc()",
        expect=stdout(re.compile(r"JSONDecodeError: ")),
        needs="neutral paths in what libraries print",
    ),
    Case(
        name="del-error",
        attacks="an exception that nobody can catch",
        code=program("""
            class C:
                def __del__(self): 1 / 0
            C()
            print('on')
        """),
        expect=stdout(re.compile(r"Exception ignored in(.*\n)*.*ZeroDivisionError: division by zero\non\n\Z")),
    ),
    Case(
        name="atexit-error",
        attacks="an error after the last line",
        code="import atexit\natexit.register(lambda: 1 / 0)\nprint('end')",
        expect=either(
            error(re.compile("ZeroDivisionError")), stdout(re.compile(r"\Aend\n(.*\n)*ZeroDivisionError: division by zero\n"))
        ),
    ),
    Case(
        name="last-value-generator",
        attacks="the echo of a value that cannot be copied out",
        code="(n for n in range(3))",
        expect=echo(re.compile(r"\A<generator object <genexpr> at 0x[0-9a-f]+>\Z")),
    ),
    Case(
        name="last-value-module",
        attacks="the echo of a module, whose repr names its file",
        code="import json\njson",
        expect=echo(re.compile(r"\A<module 'json'")),
        needs="neutral paths in what libraries print",
    ),
    Case(
        name="last-value-array",
        attacks="the echo of ten million numbers",
        code="import numpy as np\nnp.arange(10_000_000)",
        expect=echo(re.compile(r"\Aarray\(\[\s*0,\s+1,\s+2, \.\.\.")),
    ),
    Case(
        name="last-value-huge",
        attacks="the echo of a value whose repr has thirty million characters",
        code="['x' * 30_000_000]",
        expect=echo(re.compile(r"\A\['x+\n\[\.\.\. \d+ (characters|bytes) left out \.\.\.\]\nx+'\]\Z")),
    ),
    Case(
        name="repr-raises",
        attacks="the echo of a value that does not want to be seen",
        code="class C:\n    def __repr__(self): raise KeyError('hidden')\nC()",
        expect=error("KeyError: 'hidden'"),
        is_short=True,
    ),
    Case(
        name="repr-loops",
        attacks="the same, forever",
        code=program("""
            class C:
                def __repr__(self):
                    while True: pass
            C()
        """),
        wall_s=0.4,
        expect=timeout(""),
    ),
    Case(
        name="repr-no-text",
        attacks="a repr that is no text",
        code="class C:\n    def __repr__(self): return 5\nC()",
        expect=error("TypeError: __repr__ returned non-string (type int)"),
    ),
    Case(
        name="repr-text-subclass",
        attacks="a repr whose text lies about its length and its encoding",
        code=program("""
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
        name="repr-self",
        attacks="a value that contains itself, by a class of its own",
        code=program("""
            class L(list):
                def __repr__(self): return f'<{self[0]!r}>'
            x = L()
            x.append(x)
            x
        """),
        expect=error(re.compile("RecursionError")),
    ),
    Case(
        name="repr-prints",
        attacks="the echo rule: output made by the echo itself",
        code=program("""
            class C:
                def __repr__(self):
                    print('from repr')
                    return 'value'
            C()
        """),
        expect=stdout("from repr\n"),
    ),
    Case(
        name="repr-exits",
        attacks="a process that ends within its echo",
        code=program("""
            import os
            class C:
                def __repr__(self): os._exit(9)
            C()
        """),
        expect=exited(9),
    ),
    Case(
        name="none-in-disguise",
        attacks="the test whether there is a value: one that claims to equal everything",
        code=program("""
            class C:
                def __eq__(self, _): return True
                def __bool__(self): raise ValueError
                def __repr__(self): return 'here'
            C()
        """),
        expect=echo("here"),
    ),
    Case(
        name="exit-code-huge",
        attacks="exit codes that fit into no byte",
        code="raise SystemExit(2**70 + 5)",
        expect=error(re.compile(r"The program exited with code \d+\.\n")),
    ),
    Case(name="exit-code-negative", attacks="the same below zero", code="import os\nos._exit(-1)", expect=exited(255)),
    Case(
        name="exit-code-object",
        attacks="an exit whose code loops when it is shown",
        code=program("""
            class C:
                def __str__(self):
                    while True: pass
            raise SystemExit(C())
        """),
        wall_s=0.4,
        expect=timeout(""),
    ),
    Case(
        name="exit-code-property",
        attacks="an exit whose code is a trap",
        code="class E(SystemExit):\n    code = property(lambda self: 1 / 0)\nraise E",
        expect=error(re.compile("E|exited")),
    ),
    Case(
        name="exit-text",
        attacks="an exit that says why, with half a pair",
        code="import sys\nsys.exit('enough \\ud800')",
        expect=error(re.compile(r"\Aenough \\ud800\n")),
    ),
    Case(
        name="exit-quietly",
        attacks="an end that skips everything",
        code="print('lost', end='')\nimport os\nos._exit(0)",
        expect=either(empty(), stdout("lost")),
    ),
]
