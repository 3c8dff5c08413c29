"""Programs of many processes and threads: bombs, daemons and orphans. When the reply comes, all of them are dead."""

from __future__ import annotations

import re

from ..case import Case, echo, either, empty, error, exited, killed, program, stdout, timeout
from .preludes import LIBC, REFUSED, SURVIVE

CASES = [
    Case(
        "fork-bomb",
        "the process table",
        program("""
            import os
            while True:
                try: os.fork()
                except OSError: pass
        """),
        wall_s=0.5,
        expect=timeout(""),
        is_short=True,
    ),
    Case(
        "fork-until-error",
        "the limit on processes, which the kernel does not hold root to",
        program("""
            import errno, os, time
            count = 0
            try:
                while count < 1000:
                    if os.fork() == 0: time.sleep(60)
                    count += 1
            except OSError as e: print(errno.errorcode[e.errno], count < 64)
        """),
        expect=stdout("EAGAIN True\n"),
        is_short=True,
    ),
    Case(
        "thread-bomb",
        "the same by threads",
        program("""
            import threading, time
            try:
                for count in range(1000): threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            except RuntimeError as e: print(e, count < 64)
        """),
        expect=stdout("can't start new thread True\n"),
        is_short=True,
    ),
    Case(
        "shell-fork-bomb",
        "the process table, by a shell that outlives the program",
        program("""
            import os, time
            os.system('f() { f | f & }; f >/dev/null 2>&1')
            time.sleep(0.2)
            print('done')
        """),
        wall_s=2.0,
        expect=either(stdout("done\n"), timeout("")),
        is_stable=False,
        repeats_from=None,
        is_core=True,
    ),
    Case(
        "daemonize",
        "the end of a call: a daemon of the old school",
        SURVIVE
        + program("""
            read, write = os.pipe()
            if os.fork() == 0:
                leave()
                if os.fork() == 0:
                    os.write(write, b'1')
                    survive()
                os._exit(0)
            os.read(read, 1)
            print('started')
        """),
        expect=stdout("started\n"),
        is_short=True,
    ),
    Case(
        "daemon-closed-fds",
        "code that finds a call's processes by the pipes they hold",
        SURVIVE
        + program("""
            read, write = os.pipe()
            if os.fork() == 0:
                leave()
                if os.fork() == 0:
                    os.write(write, b'1')
                    os.closerange(0, 256)
                    survive()
                os._exit(0)
            os.read(read, 1)
            print('started')
        """),
        expect=stdout("started\n"),
        is_short=True,
    ),
    Case(
        "daemon-holds-output",
        "code that waits for the end of the output rather than of the program",
        SURVIVE
        + program("""
            if os.fork() == 0:
                leave()
                survive()
            print('done')
        """),
        wall_s=5.0,
        expect=stdout("done\n"),
        is_short=True,
    ),
    Case(
        "daemon-floods-late",
        "the output pipe, after the program that owned it has ended",
        SURVIVE
        + program("""
            if os.fork() == 0:
                while True: os.write(1, b'late' * 1000)
            time.sleep(0.05)
            os._exit(0)
        """),
        expect=either(killed("output"), stdout(re.compile("^(late)+"))),
        is_stable=False,
        repeats_from=None,
    ),
    Case(
        "daemon-stopped",
        "code that ends processes by a signal that a stopped one does not get",
        SURVIVE
        + program("""
            libc.prctl(36, 1, 0, 0, 0)
            if os.fork() == 0:
                leave()
                libc.prctl(15, HOST_MARK.encode(), 0, 0, 0)
                os.kill(os.getpid(), 19)
                survive()
            print(os.WIFSTOPPED(os.waitpid(-1, os.WUNTRACED)[1]))
        """),
        expect=stdout("True\n"),
        is_core=True,
    ),
    Case(
        "daemon-of-another-name",
        "code that finds a call's processes by their command line",
        SURVIVE
        + program("""
            if os.fork() == 0:
                leave()
                os.execve('/bin/sleep', ['/sbin/init', '60'], {})
            print('started')
        """),
        expect=stdout("started\n"),
        is_core=True,
    ),
    Case(
        "daemon-undumpable",
        "code that needs /proc of a process to end it",
        SURVIVE
        + program("""
            if os.fork() == 0:
                libc.prctl(4, 0, 0, 0, 0)
                leave()
                survive()
            print('started')
        """),
        expect=stdout("started\n"),
    ),
    Case(
        "chain-of-forks",
        "code that ends processes one by one: each is gone before it is found, and its child runs",
        SURVIVE
        + program("""
            if os.fork() == 0:
                leave()
                libc.prctl(15, HOST_MARK.encode(), 0, 0, 0)
                while True:
                    try:
                        if os.fork() != 0: os._exit(0)
                    except OSError: pass
            time.sleep(0.1)
            print('running')
        """),
        expect=stdout("running\n"),
        is_short=True,
    ),
    Case(
        "tree-of-chains",
        "the same, many times at once, ignoring every signal",
        SURVIVE
        + program("""
            import signal
            for number in range(1, 65):
                try: signal.signal(number, signal.SIG_IGN)
                except (OSError, ValueError): pass
            def chain():
                libc.prctl(15, HOST_MARK.encode(), 0, 0, 0)
                while True:
                    leave()
                    try:
                        if os.fork() != 0: os._exit(0)
                    except OSError: pass
            for _ in range(12):
                try:
                    if os.fork() == 0: chain()
                except OSError: pass
            time.sleep(0.1)
            print('running')
        """),
        expect=stdout("running\n"),
        is_core=True,
    ),
    Case(
        "own-subreaper",
        "code that finds orphans as its own children: the program adopts them first",
        SURVIVE
        + program("""
            libc.prctl(36, 1, 0, 0, 0)
            if os.fork() == 0:
                libc.prctl(36, 1, 0, 0, 0)
                if os.fork() == 0:
                    leave()
                    survive()
                os._exit(0)
            print('started', os.wait()[1])
        """),
        expect=stdout("started 0\n"),
    ),
    Case(
        "respawner",
        "code that ends processes one by one: two that start each other again",
        SURVIVE
        + program("""
            def watch():
                libc.prctl(15, HOST_MARK.encode(), 0, 0, 0)
                while True:
                    try: pid = os.fork()
                    except OSError: continue
                    if pid == 0: continue
                    os.waitpid(pid, 0)
            if os.fork() == 0:
                leave()
                watch()
            time.sleep(0.1)
            print('running')
        """),
        expect=stdout("running\n"),
        is_core=True,
    ),
    Case(
        "zombie-farm",
        "the process table by the dead",
        program("""
            import os, time
            count = 0
            try:
                for count in range(2000):
                    if os.fork() == 0: os._exit(0)
            except BlockingIOError: pass
            print('farmed', count < 64)
        """),
        expect=stdout("farmed True\n"),
        is_core=True,
    ),
    Case(
        "orphans",
        "a process that adopts children it never reaps",
        program("""
            import os, time
            for _ in range(200):
                if (pid := os.fork()) == 0:
                    try: os.fork()
                    except OSError: pass
                    os._exit(0)
                os.waitpid(pid, 0)
            print('orphaned')
        """),
        expect=either(stdout("orphaned\n"), error(re.compile("BlockingIOError"))),
        is_stable=False,
        repeats_from=None,
    ),
    Case(
        "fork-comes-back",
        "the runner's own lines after the program: two processes reach them",
        program("""
            import os
            if os.fork() == 0:
                1 / 0
            os.wait()
            'parent'
        """),
        expect=stdout(re.compile("ZeroDivisionError: division by zero\n")),
        is_core=True,
    ),
    Case(
        "fork-storm-comes-back",
        "the same by thirty-two of them, each with a value",
        program("""
            import os
            for _ in range(5):
                try: os.fork()
                except OSError: pass
            os.getpid() < 0
        """),
        expect=either(echo("False"), stdout(), timeout()),
        is_stable=False,
        repeats_from=None,
    ),
    Case(
        "parent-exits-first",
        "output of a child that lives longer than the program",
        program("""
            import os, time
            if os.fork() == 0:
                time.sleep(0.3)
                os.write(1, b'late')
            os._exit(0)
        """),
        expect=empty(),
        is_core=True,
    ),
    Case(
        "child-claims-success",
        "the exit code: a child's is 0, the program's is 7",
        program("""
            import os
            if os.fork() == 0: os._exit(0)
            os.wait()
            os._exit(7)
        """),
        expect=exited(7),
    ),
    Case(
        "fork-in-thread",
        "locks that a fork copies while they are held",
        program("""
            import os, threading
            def work():
                if os.fork() == 0:
                    print('child')
                    os._exit(0)
                os.wait()
            threads = [threading.Thread(target=work) for _ in range(4)]
            for t in threads: t.start()
            for t in threads: t.join()
            print('joined')
        """),
        expect=stdout("child\n" * 4 + "joined\n"),
    ),
    Case(
        "exec-in-thread",
        "a thread that replaces the whole process",
        program("""
            import os, threading
            threading.Thread(target=os.execv, args=('/bin/echo', ['echo', 'replaced'])).start()
            while True: pass
        """),
        expect=stdout("replaced\n"),
    ),
    Case(
        "main-thread-exits",
        "a process whose first thread is a zombie while another prints on",
        LIBC
        + program("""
            import threading, time
            def late():
                time.sleep(0.1)
                os.write(1, b'late')
                os._exit(0)
            threading.Thread(target=late).start()
            libc.pthread_exit(None)
        """),
        expect=either(stdout("late"), killed("signal 6"), killed("signal 11")),
    ),
    Case(
        "vfork-storm",
        "the process table by subprocesses, each a shell",
        "import subprocess\nfor _ in range(30): subprocess.Popen(['/bin/sleep', '60'])\nprint('started')",
        expect=either(stdout("started\n"), error(re.compile("BlockingIOError"))),
        is_stable=False,  # without namespaces and root its limit counts whatever else this user runs
        is_core=True,
    ),
    Case(
        "priorities",
        "the scheduling of others: the parent's and the host's, their processors and their policies",
        REFUSED
        + program("""
            import os
            for pid in (HOST_PID, os.getppid() or HOST_PID):
                print(refused(os.setpriority, os.PRIO_PROCESS, pid, 19), refused(os.sched_setaffinity, pid, {0}))
                print(refused(os.sched_setscheduler, pid, os.SCHED_IDLE, os.sched_param(0)))
        """),
        expect=stdout("True True\nTrue\n" * 2),
        is_core=True,
    ),
    Case(
        "priorities-of-user",
        "the scheduling of all processes of one's user, other calls' included",
        LIBC + "print(libc.setpriority(2, 0, 19), libc.setpriority(1, 0, 19))",
        expect=stdout("-1 -1\n"),
        needs="seccomp",
    ),
    Case(
        "better-priority",
        "the neighbours' share: a real-time policy and a negative niceness",
        REFUSED
        + program("""
            import os
            print(refused(os.nice, -5), refused(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)))
        """),
        expect=stdout("True True\n"),
        is_core=True,
    ),
    Case(
        "limits-of-others",
        "the limits of the host's and the parent's process",
        REFUSED
        + program("""
            import os, resource
            for pid in (HOST_PID, os.getppid() or HOST_PID):
                for arguments in ((resource.RLIMIT_CPU, (1, 1)), (resource.RLIMIT_AS,)):
                    print(refused(resource.prlimit, pid, *arguments), end=' ')
        """),
        expect=stdout("True " * 4),
        is_short=True,
    ),
    Case(
        "groups-of-others",
        "the process group and the session of the parent",
        REFUSED
        + program("""
            import os
            print(refused(os.setpgid, 0, HOST_PID), refused(os.setpgid, HOST_PID, 0), refused(os.tcsetpgrp, 0, HOST_PID))
        """),
        expect=stdout("True True True\n"),
    ),
]
