"""Programs that do not end by themselves, each in another way. All are stopped, and what they printed is kept."""

from __future__ import annotations

import re

from ..case import Case, either, empty, error, killed, program, stdout, timeout
from .preludes import IGNORE_ALL_SIGNALS, LIBC

WALL_S = 0.4

CASES = [
    Case(
        name="sleep",
        attacks="the clock of whoever counts CPU time only",
        code="import time\nprint('so far')\ntime.sleep(60)",
        wall_s=WALL_S,
        expect=timeout("so far\n"),
        is_short=True,
    ),
    Case(
        name="ignore-signals",
        attacks="stopping by a signal that can be ignored",
        code=IGNORE_ALL_SIGNALS + "while True: pass",
        wall_s=WALL_S,
        expect=timeout(""),
        is_short=True,
    ),
    Case(
        name="big-pow",
        attacks="stopping by a signal handler: one C call that never returns to the interpreter",
        code="9 ** 9 ** 9",
        wall_s=WALL_S,
        expect=timeout(""),
        is_short=True,
    ),
    Case(
        name="redos",
        attacks="the same in the regular expression engine",
        code="import re\nre.match('(a+)+$', 'a' * 40 + 'b')",
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="endless-sum",
        attacks="the same in an iterator",
        code="import itertools\nsum(itertools.repeat(1))",
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="evil-sort",
        attacks="the same in a sort with a comparison of the attacker's",
        code=program("""
            class C:
                def __lt__(self, other):
                    while True: pass
            sorted([C(), C()])
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="daemon-thread",
        attacks="the wait for threads: Python does not wait for daemons",
        code=program("""
            import threading, time
            threading.Thread(target=time.sleep, args=(100,), daemon=True).start()
            print('main is done')
        """),
        expect=stdout("main is done\n"),
        is_core=True,
    ),
    Case(
        name="thread-outlives-main",
        attacks="the wait for threads: Python waits for all others",
        code="import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()\nprint('main is done')",
        wall_s=WALL_S,
        expect=timeout("main is done\n"),
        is_short=True,
    ),
    Case(
        name="finally-loop",
        attacks="stopping by an exception: every one is caught",
        code=program("""
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
        name="atexit-loop",
        attacks="the end of the program: a hook that never returns",
        code=program("""
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
        name="atexit-endless",
        attacks="the same by hooks that register hooks",
        code=program("""
            import atexit
            def f(): atexit.register(f)
            f()
            print('end')
        """),
        wall_s=WALL_S,
        expect=either(stdout("end\n"), timeout("end\n")),
    ),
    Case(
        name="del-loop",
        attacks="the end of an object: a finaliser that never returns",
        code=program("""
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
        name="del-at-exit",
        attacks="the end of the interpreter: objects that live until then",
        code=program("""
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
        name="own-pipe",
        attacks="the wait for input: a pipe that the program itself keeps open",
        code=program("""
            import os
            read, write = os.pipe()
            os.dup2(read, 0)
            input()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="fifo",
        attacks="an `open` that waits in the kernel",
        code="import os\nos.mkfifo('f')\nopen('f')",
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="vfork-on-fifo",
        attacks="a parent that waits in the kernel, deaf to all but SIGKILL, for a child that waits for a FIFO",
        code=program("""
            import os
            os.mkfifo('f')
            os.posix_spawn('/bin/true', ['true'], {}, file_actions=[(os.POSIX_SPAWN_OPEN, 0, 'f', os.O_RDONLY, 0)])
        """),
        wall_s=WALL_S,
        expect=timeout(""),
        is_core=True,
    ),
    Case(
        name="lock-deadlock",
        attacks="a wait for oneself",
        code=program("""
            import threading
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="file-lock-deadlock",
        attacks="the same through a lock in the kernel that a child holds",
        code=program("""
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
        name="wait-for-child",
        attacks="a wait for a child that stops itself",
        code=program("""
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
        name="asyncio-forever",
        attacks="an event loop that swallows every cancellation",
        code=program("""
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
        name="cpu-hogs",
        attacks="the neighbours' cores: twenty threads that leave the interpreter's lock",
        code=program("""
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
        name="cpu-hog-processes",
        attacks="the same by processes in sessions of their own, at the best priority they can get",
        code=program("""
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
        name="yield-storm",
        attacks="the scheduler: sixteen threads that do nothing but give way",
        code=program("""
            import os, threading
            def spin():
                while True: os.sched_yield()
            for _ in range(16): threading.Thread(target=spin).start()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="timer-storm",
        attacks="the kernel's timers: a signal every microsecond",
        code=program("""
            import signal
            signal.signal(signal.SIGALRM, lambda *_: None)
            signal.setitimer(signal.ITIMER_REAL, 1e-6, 1e-6)
            while True: pass
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="switch-interval",
        attacks="other threads of the same process: this one never gives the lock back",
        code=program("""
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
        name="trace-loop",
        attacks="code that runs between any two lines, those of the runner included",
        code=program("""
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
        name="print-then-loop",
        attacks="what was printed before the limit, without a newline",
        code="print('half a line', end='', flush=True)\nwhile True: pass",
        wall_s=WALL_S,
        expect=timeout("half a line"),
    ),
    Case(
        name="slow-drip",
        attacks="whoever extends the limit at every sign of life, and quadratic buffers",
        code=program("""
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
        name="compile-bomb",
        attacks="the compiler's constant folding and its time",
        code="x = " + " + ".join(["(1 << 100 << 100 << 100)"] * 2_000) + "\nprint(x > 0)",
        expect=either(stdout("True\n"), error(re.compile("Error"))),
    ),
    Case(
        name="eval-growth",
        attacks="the compiler by source that doubles",
        code=program("""
            source = '1'
            while True:
                source = f'({source}+{source})'
                if len(source) > 400_000: break
                eval(source)
        """),
        expect=either(empty(), error(re.compile("Error"))),
    ),
    Case(
        name="cpu-limit-lowered",
        attacks="the CPU limit: the program sets its own to one second and ignores the warning",
        code=program("""
            import resource, signal
            signal.signal(signal.SIGXCPU, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
            while True: pass
        """),
        wall_s=6.0,
        expect=killed("signal 9"),
    ),
    Case(
        name="pause",
        attacks="a wait for a signal that nobody sends, with all of them blocked",
        code=program("""
            import signal
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            signal.sigwait({signal.SIGUSR1})
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="epoll-forever",
        attacks="a wait on descriptors that wait on each other",
        code=program("""
            import select
            polls = [select.epoll() for _ in range(4)]
            for above, below in zip(polls, polls[1:]): above.register(below)
            polls[0].poll()
        """),
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="death-signal-off",
        attacks="the signal that ends a process with its parent: switched off, and then it sleeps",
        code=LIBC + "libc.prctl(1, 0, 0, 0, 0)\nif os.fork() == 0: libc.prctl(1, 0, 0, 0, 0)\nlibc.pause()",
        wall_s=WALL_S,
        expect=timeout(""),
        is_core=True,
    ),
    Case(
        name="undumpable",
        attacks="whoever looks into /proc to stop a process: it belongs to root from here on",
        code=LIBC + "libc.prctl(4, 0, 0, 0, 0)\nprint('hidden')\nwhile True: pass",
        wall_s=WALL_S,
        expect=timeout("hidden\n"),
    ),
    Case(
        name="thread-named-like-us",
        attacks="whoever finds processes by their name",
        code=LIBC + "libc.prctl(15, b') R 1 1 1', 0, 0, 0)\nwhile True: pass",
        wall_s=WALL_S,
        expect=timeout(""),
    ),
    Case(
        name="ends-at-the-limit",
        attacks="the race between the end and the limit: either is right, a mixture is not",
        code="import time\ntime.sleep(0.29)",
        wall_s=0.3,
        expect=either(empty(), timeout("")),
        repeats_from=None,
        is_stable=False,
    ),
]
