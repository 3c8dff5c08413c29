"""Programs that end by a signal, or send one to whatever they can think of."""

from __future__ import annotations

import re

from ..case import CONFINED, PROCESS, Case, echo, either, error, killed, program, stdout, timeout
from .preludes import IS_X86, LIBC, NOT_AS_ROOT, REFUSED, SYSCALLS

# A program is pid 1 of its namespace: signals whose handler is the default one do not reach it from inside. Where it has no
# namespace, they do.
_NO_NAMESPACE = (CONFINED, PROCESS)

_MACHINE_CODE = LIBC + program("""
    import mmap
    def run(code):
        place = mmap.mmap(-1, 4096, prot=7)
        place.write(code)
        return ctypes.CFUNCTYPE(ctypes.c_long)(ctypes.addressof(ctypes.c_char.from_buffer(place)))()
""")

CASES = [
    Case(
        "alarm",
        "an alarm without a handler",
        program("""
            import signal, time
            signal.alarm(1)
            time.sleep(1.3)
            print('went on')
        """),
        expect=stdout("went on\n"),
        at=dict.fromkeys(_NO_NAMESPACE, killed("signal 14")),
    ),
    Case(
        "self-kill",
        "a program that kills itself",
        "import os\nos.kill(os.getpid(), 9)\nprint('went on')",
        expect=stdout("went on\n"),
        at=dict.fromkeys(_NO_NAMESPACE, killed("signal 9", "")),
        is_short=True,
    ),
    Case(
        "self-term",
        "the same, politely",
        "import os\nos.kill(os.getpid(), 15)\nprint('went on')",
        expect=stdout("went on\n"),
        at=dict.fromkeys(_NO_NAMESPACE, killed("signal 15", "")),
    ),
    Case(
        "self-stop",
        "a program that stops itself",
        "import os\nos.kill(os.getpid(), 19)\nprint('went on')",
        wall_s=1.0,
        expect=stdout("went on\n"),
        at=dict.fromkeys(_NO_NAMESPACE, timeout("")),
        is_core=True,
    ),
    Case(
        "self-interrupt",
        "what Python makes of SIGINT",
        "import os\nos.kill(os.getpid(), 2)\nwhile True: pass",
        wall_s=2.0,
        expect=either(error("KeyboardInterrupt"), timeout("")),
    ),
    Case(
        "abort",
        "the end by abort, which is deaf to handlers",
        "import os, signal\nsignal.signal(signal.SIGABRT, signal.SIG_IGN)\nos.abort()",
        expect=either(killed("signal 6", ""), killed("signal 11", "")),
        is_core=True,
    ),
    Case(
        "segfault",
        "the end by a read of address 0",
        "import ctypes\nprint('before')\nctypes.string_at(0)",
        expect=killed("signal 11", "before\n"),
        is_short=True,
    ),
    Case(
        "segfault-in-thread",
        "the same next to a main thread that waits",
        program("""
            import ctypes, threading
            t = threading.Thread(target=ctypes.string_at, args=(0,))
            t.start()
            t.join()
        """),
        expect=killed("signal 11", ""),
    ),
    Case(
        "segfault-ignored",
        "the same with a handler that returns: the fault comes again, forever",
        "import ctypes, signal\nsignal.signal(signal.SIGSEGV, lambda *_: None)\nctypes.string_at(0)",
        wall_s=0.5,
        expect=timeout(""),
    ),
    Case(
        "faulthandler",
        "a report of the crash by Python itself, which may name places of the runner",
        program("""
            import faulthandler, ctypes, json
            faulthandler.enable()
            json.JSONDecoder(object_hook=lambda _: ctypes.string_at(0)).decode('{}')
        """),
        expect=killed("signal 11", re.compile(r"\AFatal Python error: Segmentation fault\n")),
        needs="neutral paths in what libraries print",
    ),
    Case(
        "dump-later",
        "a watchdog thread that ends the process",
        "import faulthandler\nfaulthandler.dump_traceback_later(0.1, exit=True)\nwhile True: pass",
        expect=error(re.compile(r"Timeout \(0:00:00.100000\)!\n")),
    ),
    Case(
        "broken-heap",
        "the C library's own checks",
        LIBC + "libc.free(ctypes.c_void_p(id(libc) + 8))\nprint('freed')",
        expect=either(killed("signal 6"), killed("signal 11"), stdout("freed\n")),
    ),
    Case(
        "overwritten-none",
        "the interpreter itself: None is no longer what it was",
        "import ctypes\nctypes.memset(id(None), 0, 16)\nNone.x",
        expect=either(killed("signal 11"), killed("signal 6"), error(re.compile("Error"))),
    ),
    Case(
        "overwritten-int",
        "the interpreter's small integers: 7 is 8 from here on",
        "import ctypes\nctypes.memmove(id(7), id(8), 32)\nprint(7)",
        expect=stdout("8\n"),
    ),
    Case(
        "bytecode",
        "the interpreter's loop by byte code that no compiler would write",
        "def f(): pass\nf.__code__ = f.__code__.replace(co_code=bytes(range(2, 250)), co_stacksize=0)\nf()",
        expect=either(killed("signal 11"), killed("signal 6"), error(re.compile("."))),
    ),
    Case(
        "stack-smash",
        "the C stack below the interpreter",
        LIBC
        + "buffer = ctypes.create_string_buffer(8)\nctypes.memset(ctypes.addressof(buffer), 0xFF, 1 << 20)\nprint('survived')",
        expect=either(killed("signal 11"), killed("signal 6"), stdout("survived\n")),
    ),
    Case(
        "thread-stack",
        "the stack of a thread, larger than memory and then overrun",
        program("""
            import threading
            try: threading.stack_size(1 << 34)
            except ValueError: print('too large')
            try: threading.Thread(target=print, args=('ran',)).start()
            except RuntimeError: print('refused')
        """),
        memory_mib=128,
        expect=either(stdout("refused\n"), stdout("too large\nran\n")),
    ),
    Case(
        "illegal-instruction",
        "the processor",
        _MACHINE_CODE + "run(b'\\x0f\\x0b\\0\\0')",  # ud2 on x86; no instruction on ARM either
        expect=either(killed("signal 4", ""), killed("signal 11", "")),
    ),
    Case(
        "divide-by-zero",
        "the processor's own exception",
        _MACHINE_CODE + f"run(b'\\x31\\xc9\\x31\\xd2\\xf7\\xf1\\xc3' if {IS_X86} else bytes(4))",
        expect=either(killed("signal 8", ""), killed("signal 4", ""), killed("signal 11", "")),
    ),
    *(
        [
            Case(
                "i386-syscall",
                "a filter that knows the numbers of one architecture only: getpid by the 32-bit door",
                _MACHINE_CODE + "print(run(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3') > 0)",
                expect=either(killed("signal 31", ""), killed("policy", ""), stdout("False\n")),
                needs="seccomp",
                is_core=True,
            ),
            Case(
                "x32-syscall",
                "the same by the numbers of x32",
                LIBC + "print(libc.syscall(ctypes.c_long(39 | 0x40000000)) > 0)",
                expect=either(killed("signal 31", ""), killed("policy", ""), stdout("False\n")),
                needs="seccomp",
                is_core=True,
            ),
        ]
        if IS_X86
        else []
    ),
    Case(
        "kill-parent",
        "the process that started it",
        program("""
            import os
            try: os.kill(os.getppid(), 9)
            except OSError: pass
            print('alive')
        """),
        expect=either(stdout("alive\n"), killed("signal 9", "")),
        is_core=True,
    ),
    Case(
        "kill-group",
        "everything in its process group",
        "import os\nos.kill(0, 9)\nprint('alive')",
        expect=either(stdout("alive\n"), killed("signal 9", "")),
        is_core=True,
    ),
    Case(
        "kill-all",
        "everything that it may signal",
        NOT_AS_ROOT + "try: os.kill(-1, 9)\nexcept OSError: pass\nprint('alive')",
        expect=either(stdout("alive\n"), killed("signal 9", "")),
        is_short=True,
    ),
    Case(
        "kill-scan",
        "every process id there is",
        NOT_AS_ROOT
        + program("""
            found = []
            for pid in range(1, 32769):
                if pid == os.getpid(): continue
                try: os.kill(pid, 9)
                except OSError: continue
                found.append(pid)
            print(found)
        """),
        expect=stdout("[]\n"),
        is_core=True,
    ),
    Case(
        "kill-host",
        "the process of the service, by its number on the host",
        REFUSED + "import os, signal\nprint(refused(os.kill, HOST_PID, 9), refused(os.killpg, HOST_PID, 9))",
        expect=stdout("True True\n"),
        is_short=True,
    ),
    Case(
        "kill-by-other-doors",
        "rules that know `kill` only: sigqueue, tgkill and a pidfd, on the host and on the parent",
        LIBC
        + program(f"""
            info = ctypes.create_string_buffer(128)
            info[8:12] = (-1 & 0xFFFFFFFF).to_bytes(4, 'little')
            for pid in (HOST_PID, os.getppid() or HOST_PID):
                print(libc.syscall({SYSCALLS["rt_sigqueueinfo"]}, pid, 9, info), end=' ')
                print(libc.syscall({SYSCALLS["tgkill"]}, pid, pid, 9))
                fd = libc.syscall({SYSCALLS["pidfd_open"]}, pid, 0)
                print(libc.syscall({SYSCALLS["pidfd_send_signal"]}, fd, 9, None, 0))
        """),
        expect=stdout("-1 -1\n-1\n" * 2),
        is_core=True,
    ),
    Case(
        "owner-of-a-pipe",
        "signals that the kernel sends for a descriptor: SIGIO to the parent and to the host",
        program("""
            import fcntl, os, signal, socket
            a, b = socket.socketpair()
            for owner in (HOST_PID, os.getppid()):
                try: fcntl.fcntl(a, fcntl.F_SETOWN, owner)
                except OSError: continue
                fcntl.fcntl(a, 10, signal.SIGKILL)  # F_SETSIG
                fcntl.fcntl(a, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
                b.send(b'x')
            print('sent')
        """),
        expect=either(stdout("sent\n"), killed("signal 9", "")),
        is_core=True,
    ),
    Case(
        "timer-for-another",
        "a timer whose signal goes to another thread id: the parent's",
        LIBC
        + program("""
            event = (ctypes.c_int * 16)()
            event[2], event[3], event[4] = 9, 4, os.getppid() or HOST_PID  # SIGKILL, SIGEV_THREAD_ID
            timer = ctypes.c_int()
            print(libc.timer_create(0, event, ctypes.byref(timer)))
        """),
        expect=stdout("-1\n"),
    ),
    Case(
        "own-filter",
        "the last words of the runner: a filter of the program's own kills its process at the next `write`",
        LIBC
        + program("""
            import struct
            rules = struct.pack('HBBI', 0x20, 0, 0, 0) + struct.pack('HBBI', 0x15, 0, 1, %d)
            rules += struct.pack('HBBI', 6, 0, 0, 0x80000000) + struct.pack('HBBI', 6, 0, 0, 0x7FFF0000)
            buffer = ctypes.create_string_buffer(rules, len(rules))
            print('last words', flush=True)
            libc.prctl(38, 1, 0, 0, 0)
            libc.prctl(22, 2, struct.pack('HxxxxxxQ', 4, ctypes.addressof(buffer)), 0, 0)
            print('not heard', flush=True)
        """)
        % (1 if IS_X86 else 64),
        expect=killed("signal 31", "last words\n"),
    ),
    Case(
        "strict-mode",
        "the same by seccomp's first mode, where even an orderly end is forbidden",
        LIBC + "print('in', flush=True)\nlibc.prctl(22, 1, 0, 0, 0)\nprint('still', flush=True)",
        expect=either(stdout("in\nstill\n"), *(killed(f"signal {number}", re.compile(r"\Ain\n")) for number in (9, 11, 31))),
    ),
    Case(
        "handler-raises-late",
        "the runner's own lines after the program: a timer whose handler raises, again and again",
        program("""
            import signal
            def ring(*_): raise RuntimeError('rang')
            signal.signal(signal.SIGALRM, ring)
            signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-5)
            5
        """),
        expect=either(echo("5"), error(re.compile("RuntimeError|exited with code"))),
        repeats_from=None,
        is_stable=False,
    ),
]
