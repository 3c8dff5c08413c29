"""Programs that do not end by themselves, each in another way. All are stopped, and what they printed is kept."""

from __future__ import annotations

import re

from ..case import Case, either, empty, error, killed, program, stdout, timeout
from .preludes import IGNORE_ALL_SIGNALS, LIBC

WALL_S = 0.4

CASES = [
    Case(
        "sleep",
        "the clock of code that counts CPU time only",
        "import time\nprint('so far')\ntime.sleep(60)",
        wall_s=WALL_S,
        expect=timeout("so far\n"),
        is_short=True,
    ),
    Case(
        "ignore-signals",
        "stopping by a signal that can be ignored",
        IGNORE_ALL_SIGNALS + "while True: pass",
        wall_s=WALL_S,
        expect=timeout(""),
        is_short=True,
    ),
    Case(
        "big-pow",
        "stopping by a signal handler: one C call that never returns to the interpreter",
        "9 ** 9 ** 9",
        wall_s=WALL_S,
        expect=timeout(""),
        is_short=True,
    ),
    Case(
        "redos",
        "the same in the regular expression engine",
        "import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "endless-sum",
        "the same in an iterator",
        "import itertools\nsum(itertools.repeat(1))",
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "evil-sort",
        "the same in a sort with a comparison of the attacker's",
        program("""
            class C:
                def __lt__(self, other):
                    while True: pass
            sorted([C(), C()])
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "daemon-thread",
        "the wait for threads: Python does not wait for daemons",
        program("""
            import threading, time
            threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
            print('main is done')
        """),
        expect=stdout("main is done\n"),
        is_core=True,
    ),
    Case(
        "thread-outlives-main",
        "the wait for threads: Python waits for all others",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\nprint('main is done')",
        wall_s=WALL_S,
        expect=timeout("main is done\n"),
        is_short=True,
    ),
    Case(
        "finally-loop",
        "stopping by an exception: every one is caught",
        program("""
            while True:
                try:
                    while True: pass
                except BaseException: pass
                finally: continue
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "atexit-loop",
        "the end of the program: a hook that never returns",
        program("""
            import atexit
            @atexit.register
            def f():
                while True: pass
            print('end')
        """),
        wall_s=WALL_S,
        expect=timeout("end\n"),
        is_short=True,
    ),
    Case(
        "atexit-endless",
        "the same by hooks that register hooks",
        program("""
            import atexit
            def f(): atexit.register(f)
            f()
            print('end')
        """),
        wall_s=WALL_S,
        expect=either(stdout("end\n"), timeout("end\n")),
    ),
    Case(
        "del-loop",
        "the end of an object: a finaliser that never returns",
        program("""
            class C:
                def __del__(self):
                    while True: pass
            x = C()
            del x
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "del-at-exit",
        "the end of the interpreter: objects that live until then",
        program("""
            class C:
                def __del__(self):
                    while True: pass
            kept = C()
            print('end')
        """),
        wall_s=WALL_S,
        expect=either(stdout("end\n"), timeout("end\n")),
    ),
    Case(
        "own-pipe",
        "the wait for input: a pipe that the program itself keeps open",
        program("""
            import os
            read, write = os.pipe()
            os.dup2(read, 0)
            input()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "fifo", "an `open` that waits in the kernel", "import os\nos.mkfifo('f')\nopen('f')", wall_s=WALL_S, expect=timeout("")
    ),
    Case(
        "vfork-on-fifo",
        "a parent that waits in the kernel, deaf to all but SIGKILL, for a child that waits for a FIFO",
        program("""
            import os
            os.mkfifo('f')
            os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, 'f', os.O_RDONLY, 0)])
        """),
        wall_s=WALL_S,
        expect=timeout(""),
        is_core=True,
    ),
    Case(
        "lock-deadlock",
        "a wait for oneself",
        program("""
            import threading
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "file-lock-deadlock",
        "the same through a lock in the kernel that a child holds",
        program("""
            import fcntl, os, time
            f = open('lock', 'w')
            if os.fork() == 0:
                g = open('lock', 'w')
                fcntl.lockf(g, fcntl.LOCK_EX)
                open('held', 'w').close()
                time.sleep(60)
            while not os.path.exists('held'): time.sleep(0.01)
            fcntl.lockf(f, fcntl.LOCK_EX)
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "wait-for-child",
        "a wait for a child that stops itself",
        program("""
            import os, signal
            pid = os.fork()
            if pid == 0: os.kill(os.getpid(), signal.SIGSTOP)
            os.waitpid(pid, 0)
        """),
        wall_s=WALL_S,
        expect=timeout(""),
        is_core=True,
    ),
    Case(
        "asyncio-forever",
        "an event loop that swallows every cancellation",
        program("""
            import asyncio
            async def f():
                while True:
                    try: await asyncio.sleep(1)
                    except BaseException: pass
            asyncio.run(f())
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "cpu-hogs",
        "the neighbours' cores: twenty threads that leave the interpreter's lock",
        program("""
            import hashlib, threading
            def burn():
                while True: hashlib.sha256(bytes(1 << 20)).digest()
            for _ in range(20): threading.Thread(target=burn).start()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
        is_short=True,
    ),
    Case(
        "cpu-hog-processes",
        "the same by processes in sessions of their own, at the best priority they can get",
        program("""
            import os
            for _ in range(8):
                if os.fork() == 0:
                    for leave in (os.setsid, lambda: os.nice(-20)):
                        try: leave()
                        except OSError: pass
                    while True: pass
            while True: pass
        """),
        wall_s=WALL_S,
        expect=timeout(""),
        is_core=True,
    ),
    Case(
        "yield-storm",
        "the scheduler: sixteen threads that do nothing but give way",
        program("""
            import os, threading
            def spin():
                while True: os.sched_yield()
            for _ in range(16): threading.Thread(target=spin).start()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "timer-storm",
        "the kernel's timers: a signal every microsecond",
        program("""
            import signal
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)
            while True: pass
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "switch-interval",
        "other threads of the same process: this one never gives the lock back",
        program("""
            import sys, threading
            sys.setswitchinterval(1e6)
            def spin():
                while True: pass
            threading.Thread(target=spin).start()
            spin()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "trace-loop",
        "code that runs between any two lines, those of the runner included",
        program("""
            import sys
            def trace(*_):
                while True: pass
            sys.settrace(trace)
            def f(): pass
            f()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "print-then-loop",
        "what was printed before the limit, without a newline",
        "print('half a line', end='', flush=True)\nwhile True: pass",
        wall_s=WALL_S,
        expect=timeout("half a line"),
    ),
    Case(
        "slow-drip",
        "code that extends the limit at every sign of life, and quadratic buffers",
        program("""
            import os, time
            while True:
                os.write(1, b'.')
                time.sleep(0.01)
        """),
        wall_s=WALL_S,
        expect=timeout(re.compile(r"\A\.+\Z")),
        repeats_from=None,
    ),
    Case(
        "compile-bomb",
        "the compiler's constant folding and its time",
        "x = " + " + ".join(["(1 << 100 << 100 << 100)"] * 2_000) + "\nprint(x > 0)",
        expect=either(stdout("True\n"), error(re.compile("Error"))),
    ),
    Case(
        "eval-growth",
        "the compiler by source that doubles",
        program("""
            source = '1'
            while True:
                source = f'({source}+{source})'
                if len(source) > 400_000: break
                eval(source)
        """),
        expect=either(empty(), error(re.compile("Error"))),
    ),
    Case(
        "cpu-limit-lowered",
        "the CPU limit: the program sets its own to one second and ignores the warning",
        program("""
            import resource, signal
            signal.signal(signal.SIGXCPU, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
            while True: pass
        """),
        wall_s=6.0,
        expect=killed("signal 9"),
    ),
    Case(
        "pause",
        "a wait for a signal that never comes, with all of them blocked",
        program("""
            import signal
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            signal.sigwait({signal.SIGUSR1})
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "epoll-forever",
        "a wait on descriptors that wait on each other",
        program("""
            import select
            polls = [select.epoll() for _ in range(4)]
            for above, below in zip(polls, polls[1:]): above.register(below)
            polls[0].poll()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "death-signal-off",
        "the signal that ends a process with its parent: switched off, and then it sleeps",
        LIBC + "libc.prctl(1, 0, 0, 0, 0)\nif os.fork() == 0: libc.prctl(1, 0, 0, 0, 0)\nlibc.pause()",
        wall_s=WALL_S,
        expect=timeout(""),
        is_core=True,
    ),
    Case(
        "undumpable",
        "code that looks into /proc to stop a process: it belongs to root from here on",
        LIBC + "libc.prctl(4, 0, 0, 0, 0)\nprint('hidden')\nwhile True: pass",
        wall_s=WALL_S,
        expect=timeout("hidden\n"),
    ),
    Case(
        "thread-named-like-us",
        "code that finds processes by their name",
        LIBC + "libc.prctl(15, b') R 1 1 1', 0, 0, 0)\nwhile True: pass",
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        "ends-at-the-limit",
        "the race between the end and the limit: either is right, a mixture is not",
        "import time\ntime.sleep(0.29)",
        wall_s=0.3,
        expect=either(empty(), timeout("")),
        repeats_from=None,
        is_stable=False,
    ),
]
