"""Programs that poison the interpreter they run in: the runner must still tell their end, and the next call not notice."""

from __future__ import annotations

import re

from ..case import Case, echo, either, empty, error, exited, killed, program, stdout, timeout

CASES = [
    Case(
        "builtins-none",
        "the names that the runner uses after the program",
        "import builtins\nbuiltins.print = builtins.open = builtins.repr = builtins.isinstance = builtins.type = None\n1",
        expect=echo("1"),
        is_short=True,
    ),
    Case(
        "builtins-cleared",
        "the same, all of them",
        "import builtins\nbuiltins.__dict__.clear()\n1",
        expect=either(echo("1"), error(re.compile("Error"))),
        is_core=True,
    ),
    Case(
        "builtins-hostile",
        "the same by functions that end the process, or loop",
        program("""
            import builtins, os
            for name in 'len str isinstance getattr range min bytes'.split(): setattr(builtins, name, lambda *_: os._exit(0))
            1 / 0
        """),
        expect=either(error(re.compile("ZeroDivisionError")), empty()),
        is_core=True,
    ),
    Case(
        "patch-modules",
        "the modules that the runner uses after the program",
        program("""
            import atexit, io, json, linecache, os, signal, struct, sys, threading, traceback
            for module in (json, traceback, linecache, struct, atexit):
                for name in dir(module):
                    if not name.startswith('__'): setattr(module, name, None)
            os._exit = os.write = os.getpid = sys.excepthook = sys.exit = None
            1 / 0
        """),
        expect=error(re.compile("ZeroDivisionError")),
        is_core=True,
    ),
    Case(
        "patch-numpy",
        "libraries that many calls share: the next one must compute rightly",
        before=(
            program("""
            import numpy as np, math
            np.sum = np.array = np.ndarray = math.sqrt = None
            np.add.at = None if False else np.add
        """),
        ),
        code="import numpy as np, math\nprint(np.sum(np.array([1, 2])), math.sqrt(9.0))",
        expect=stdout("3 3.0\n"),
    ),
    Case(
        "patch-sympy-cache",
        "the caches of a library",
        before=(
            program("""
            import sympy
            from sympy.core.cache import clear_cache
            sympy.Integer.__add__ = lambda *_: sympy.Integer(7)
            sympy.core.numbers.Integer(2) + 1
        """),
        ),
        code="import sympy\nprint(sympy.Integer(1) + 1, sympy.solve('x**2 - 4'))",
        wall_s=30.0,
        expect=stdout("2 [-2, 2]\n"),
    ),
    Case(
        "os-exit-patched",
        "the runner's way out",
        program("""
            import os, sys
            os._exit = sys.exit = lambda *_: None
            os.abort = lambda: None
            3
        """),
        expect=echo("3"),
    ),
    Case(
        "getpid-patched",
        "the runner's check that it is still the same process",
        "import os\nos.getpid = lambda: 424242\n3",
        expect=echo("3"),
    ),
    Case(
        "modules-wrecked",
        "the table of modules, the main one and the import system",
        program("""
            import sys, builtins
            sys.modules.clear()
            sys.modules['__main__'] = None
            sys.meta_path.clear()
            sys.path_hooks.clear()
            builtins.__import__ = None
            1 / 0
        """),
        expect=error(re.compile("ZeroDivisionError: division by zero")),
        is_short=True,
    ),
    Case(
        "modules-hostile",
        "the same by modules that answer every question wrongly",
        program("""
            import sys
            class Trap:
                def __getattr__(self, name): raise BaseException(name)
            for name in list(sys.modules): sys.modules[name] = Trap()
            5
        """),
        expect=either(echo("5"), error(re.compile("BaseException"))),
        is_core=True,
    ),
    Case(
        "import-hooks",
        "imports that the runner may do late",
        program("""
            import builtins, sys
            class Finder:
                def find_spec(self, *_): raise SystemExit(0)
            sys.meta_path.insert(0, Finder())
            builtins.__import__ = lambda *_: 1 / 0
            raise ValueError('shown')
        """),
        expect=error(re.compile("ValueError: shown")),
        is_core=True,
    ),
    Case(
        "import-hooks-left",
        "the imports of the next call",
        before=(
            program("""
            import builtins, sys
            sys.meta_path.clear()
            sys.path[:] = ['/planted']
            builtins.__import__ = None
        """),
        ),
        code="import fractions\nprint(fractions.Fraction(1, 2))",
        expect=stdout("1/2\n"),
    ),
    Case(
        "threading-shutdown",
        "the wait for threads at the end",
        program("""
            import threading
            threading._shutdown = None
            threading._register_atexit = None
            5
        """),
        expect=either(echo("5"), error(re.compile("TypeError"))),
        is_core=True,
    ),
    Case(
        "threading-fake",
        "the same by a module that only looks like it",
        program("""
            import sys
            class Fake:
                def _shutdown(self):
                    while True: pass
            sys.modules['threading'] = Fake()
            print('end')
        """),
        wall_s=0.4,
        expect=timeout("end\n"),
    ),
    Case(
        "audit-hook",
        "everything that the interpreter does from here on: a hook that forbids it",
        program("""
            import sys
            def hook(*_): raise RuntimeError('no')
            sys.addaudithook(hook)
            5
        """),
        expect=either(echo("5"), error(re.compile("RuntimeError|cannot be shown"))),
        is_core=True,
    ),
    Case(
        "audit-hook-error",
        "the same while a traceback is made",
        program("""
            import sys
            def hook(*_): raise RuntimeError('no')
            sys.addaudithook(hook)
            x = 1 / 0
        """),
        expect=error(re.compile("ZeroDivisionError")),
    ),
    Case(
        "trace-runner",
        "the runner's own lines: a tracer put on the frames below the program",
        program("""
            import sys
            def tracer(frame, event, _):
                if 'exit_code' in frame.f_locals: raise ValueError('into the runner')
                return tracer
            frame = sys._getframe()
            while frame:
                frame.f_trace = tracer
                frame = frame.f_back
            sys.settrace(tracer)
            5
        """),
        expect=either(echo("5"), error(re.compile("")), exited(1)),
        is_core=True,
    ),
    Case(
        "profile-runner",
        "the same by a profiler, which sees every call of the runner",
        program("""
            import sys
            def profiler(frame, event, _):
                if frame.f_code.co_filename != '<code>': raise ValueError('seen')
            sys.setprofile(profiler)
            5
        """),
        expect=either(echo("5"), error(re.compile(""))),
        is_core=True,
    ),
    Case(
        "runner-globals",
        "the runner's module: every global of the frames below",
        program("""
            import sys
            frame = sys._getframe().f_back
            while frame:
                for name in list(frame.f_globals):
                    if not name.startswith('__'): frame.f_globals[name] = None
                frame = frame.f_back
            5
        """),
        expect=either(echo("5"), error(re.compile(""))),
        is_core=True,
    ),
    Case(
        "runner-functions",
        "the runner's functions: their code and their defaults",
        program("""
            import gc, types
            for f in gc.get_objects():
                if type(f) is types.FunctionType and f.__module__ != '__main__' and 'inside' in f.__code__.co_filename:
                    f.__defaults__ = None
                    f.__code__ = (lambda *_, **__: None).__code__ if not f.__closure__ else f.__code__
            5
        """),
        expect=either(echo("5"), *[either(empty(), error(re.compile("")))]),
        is_core=True,
    ),
    Case(
        "recursion-limit-low",
        "the stack that the runner needs after the program",
        program("""
            import sys
            def f(n):
                if n: return f(n - 1)
                try: sys.setrecursionlimit(n + 60)
                except RecursionError: pass
            f(0)
            for n in range(60, 0, -1):
                try: sys.setrecursionlimit(n)
                except RecursionError: break
            1 / 0
        """),
        expect=error(re.compile("ZeroDivisionError|RecursionError")),
        is_core=True,
    ),
    Case(
        "gc-unfreeze",
        "the pages that calls share: all of them are touched",
        program("""
            import gc
            gc.unfreeze()
            for _ in range(20): gc.collect()
            print('collected')
        """),
        wall_s=30.0,
        expect=stdout("collected\n"),
    ),
    Case(
        "gc-callbacks",
        "the runner's lines by the collector: a callback that never returns",
        program("""
            import gc
            def f(*_):
                while True: pass
            gc.callbacks.append(f)
            gc.set_threshold(1)
            x = [[] for _ in range(100)]
        """),
        wall_s=0.4,
        expect=timeout(""),
    ),
    Case(
        "codecs",
        "the encodings: utf-8 is something else from here on",
        program("""
            import codecs, sys
            sys.modules['encodings'].utf_8.encode = None
            codecs.register(lambda name: 1 / 0)
            codecs.register_error('backslashreplace', lambda e: ('x' * (1 << 30), e.end))
            codecs.register_error('replace', lambda e: (1 / 0, 0))
            raise ValueError('\\ud800')
        """),
        expect=error(re.compile("ValueError")),
        is_core=True,
    ),
    Case(
        "linecache",
        "the source that tracebacks quote",
        program("""
            import linecache
            linecache.cache.clear()
            linecache.getlines = linecache.getline = linecache.checkcache = lambda *_: ['x' * 10_000_000] * 10
            1 / 0
        """),
        expect=error(re.compile("ZeroDivisionError")),
    ),
    Case(
        "type-patched",
        "the types that everybody shares: a subclass of str that the interpreter takes for str",
        program("""
            import ctypes
            class S(str): pass
            s = S('text')
            ctypes.c_void_p.from_address(id(s) + 8).value = 0
            print('alive')
            s.upper()
        """),
        expect=either(killed("signal 11"), killed("signal 6")),
    ),
    Case(
        "exec-main-gone",
        "the main module: replaced by the program, which then ends with a value",
        program("""
            import sys
            sys.modules['__main__'] = 5
            __builtins__ = None
            7
        """),
        expect=either(echo("7"), error(re.compile("Error"))),
    ),
    Case(
        "displayhook",
        "the echo: a hook and an underscore of the program's own",
        program("""
            import sys, builtins
            sys.displayhook = lambda value: print('mine')
            builtins._ = 5
            7
        """),
        expect=either(echo("7"), stdout("mine\n")),
    ),
    Case(
        "excepthook",
        "the report of an error by a hook that ends the process well",
        "import os, sys\nsys.excepthook = sys.unraisablehook = lambda *_: os._exit(0)\n1 / 0",
        expect=error("ZeroDivisionError: division by zero"),
        is_core=True,
    ),
    Case(
        "atexit-exits",
        "the exit code by a hook: an error that looks like a normal end",
        "import atexit, os\natexit.register(os._exit, 0)\n1 / 0",
        expect=either(error(re.compile("ZeroDivisionError")), empty()),
    ),
    Case(
        "atexit-forks",
        "the end by a hook that makes two of it",
        "import atexit, os\natexit.register(os.fork)\nprint('end')",
        expect=stdout("end\n"),
        is_core=True,
    ),
    Case(
        "warnings-as-errors",
        "the runner's own code under a filter that makes every warning an error",
        program("""
            import warnings
            warnings.simplefilter('error')
            warnings.showwarning = None
            '\\d'
        """),
        expect=either(echo(r"'\\d'"), error(re.compile("Warning"))),
    ),
    Case(
        "locale",
        "the C library's locale and time zone",
        before=(
            program("""
            import locale, os, time
            os.environ['TZ'] = 'Asia/Tokyo'
            time.tzset()
            locale.setlocale(locale.LC_ALL, 'C')
        """),
        ),
        code="import time\nprint(time.tzname[0], time.localtime(0).tm_hour, f'{1234.5:n}')",
        expect=stdout("UTC 0 1234.5\n"),
    ),
    Case(
        "random-state-left",
        "the draws of the next call",
        before=(
            program("""
            import random, numpy
            random.seed(1)
            numpy.random.seed(1)
            random.random = lambda: 0.5
        """),
        ),
        code="import random\nprint(random.random())",
        expect=stdout(re.compile(r"\A0\.\d+\n\Z")),
    ),
    Case(
        "ctypes-closed-libc",
        "the C library under the interpreter's feet",
        program("""
            import ctypes
            libc = ctypes.CDLL(None)
            libc.close(1)
            libc._exit(0)
        """),
        expect=empty(),
    ),
    Case(
        "ready-mark-forged",
        "the mark by which the runner says that the program has begun",
        "import os\nos.write(1, b'\\x01\\x01\\x01')\nos._exit(0)",
        expect=stdout("\x01\x01\x01"),
        is_core=True,
    ),
]
