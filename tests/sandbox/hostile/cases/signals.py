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
        name="alarm",
        attacks="an alarm that nobody handles",
        code=program("""
            import signal, time
            signal.alarm(1)
            time.sleep(1.3)
            print('went on')
        """),
        expect=stdout("went on\n"),
        at=dict.fromkeys(_NO_NAMESPACE, killed("signal 14")),
    ),
    Case(
        name="self-kill",
        attacks="a program that kills itself",
        code="import os\nos.kill(os.getpid(), 9)\nprint('went on')",
        expect=stdout("went on\n"),
        at=dict.fromkeys(_NO_NAMESPACE, killed("signal 9", "")),
        is_short=True,
    ),
    Case(
        name="self-term",
        attacks="the same, politely",
        code="import os\nos.kill(os.getpid(), 15)\nprint('went on')",
        expect=stdout("went on\n"),
        at=dict.fromkeys(_NO_NAMESPACE, killed("signal 15", "")),
    ),
    Case(
        name="self-stop",
        attacks="a program that stops itself",
        code="import os\nos.kill(os.getpid(), 19)\nprint('went on')",
        wall_s=1.0,
        expect=stdout("went on\n"),
        at=dict.fromkeys(_NO_NAMESPACE, timeout("")),
        is_core=True,
    ),
    Case(
        name="self-interrupt",
        attacks="what Python makes of SIGINT",
        code="import os\nos.kill(os.getpid(), 2)\nwhile True: pass",
        wall_s=2.0,
        expect=either(error("KeyboardInterrupt"), timeout("")),
    ),
    Case(
        name="abort",
        attacks="the end by abort, which is deaf to handlers",
        code="import os, signal\nsignal.signal(signal.SIGABRT, signal.SIG_IGN)\nos.abort()",
        expect=either(killed("signal 6", ""), killed("signal 11", "")),
        is_core=True,
    ),
    Case(
        name="segfault",
        attacks="the end by a read of address 0",
        code="import ctypes\nprint('before')\nctypes.string_at(0)",
        expect=killed("signal 11", "before\n"),
        is_short=True,
    ),
    Case(
        name="segfault-in-thread",
        attacks="the same beside a main thread that waits",
        code=program("""
            import ctypes, threading
            t = threading.Thread(target=ctypes.string_at, args=(0,))
            t.start()
            t.join()
        """),
        expect=killed("signal 11", ""),
    ),
    Case(
        name="segfault-ignored",
        attacks="the same with a handler that returns: the fault comes again, forever",
        code="import ctypes, signal\nsignal.signal(signal.SIGSEGV, lambda *_: None)\nctypes.string_at(0)",
        wall_s=0.5,
        expect=timeout(""),
    ),
    Case(
        name="faulthandler",
        attacks="a report of the crash by Python itself, which may name places of the runner",
        code=program("""
            import faulthandler, ctypes, json
            faulthandler.enable()
            json.JSONDecoder(object_hook=lambda _: ctypes.string_at(0)).decode('{}')
        """),
        expect=killed("signal 11", re.compile(r"\AFatal Python error: Segmentation fault\n")),
        needs="neutral paths in what libraries print",
    ),
    Case(
        name="dump-later",
        attacks="a watchdog thread that ends the process",
        code="import faulthandler\nfaulthandler.dump_traceback_later(0.1, exit=True)\nwhile True: pass",
        expect=error(re.compile(r"Timeout \(0:00:00.100000\)!\n")),
    ),
    Case(
        name="broken-heap",
        attacks="the C library's own checks",
        code=LIBC + "libc.free(ctypes.c_void_p(id(libc) + 8))\nprint('freed')",
        expect=either(killed("signal 6"), killed("signal 11"), stdout("freed\n")),
    ),
    Case(
        name="overwritten-none",
        attacks="the interpreter itself: None is no longer what it was",
        code="import ctypes\nctypes.memset(id(None), 0, 16)\nNone.x",
        expect=either(killed("signal 11"), killed("signal 6"), error(re.compile("Error"))),
    ),
    Case(
        name="overwritten-int",
        attacks="the interpreter's small integers: 7 is 8 from here on",
        code="import ctypes\nctypes.memmove(id(7), id(8), 32)\nprint(7)",
        expect=stdout("8\n"),
    ),
    Case(
        name="bytecode",
        attacks="the interpreter's loop by byte code that no compiler would write",
        code="def f(): pass\nf.__code__ = f.__code__.replace(co_code=bytes(range(2, 250)), co_stacksize=0)\nf()",
        expect=either(killed("signal 11"), killed("signal 6"), error(re.compile("."))),
    ),
    Case(
        name="stack-smash",
        attacks="the C stack below the interpreter",
        code=LIBC
        + "buffer = ctypes.create_string_buffer(8)\nctypes.memset(ctypes.addressof(buffer), 0xFF, 1 << 20)\nprint('survived')",
        expect=either(killed("signal 11"), killed("signal 6"), stdout("survived\n")),
    ),
    Case(
        name="thread-stack",
        attacks="the stack of a thread, larger than memory and then overrun",
        code=program("""
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
        name="illegal-instruction",
        attacks="the processor",
        code=_MACHINE_CODE + "run(b'\\x0f\\x0b\\0\\0')",  # ud2 on x86; no instruction on ARM either
        expect=either(killed("signal 4", ""), killed("signal 11", "")),
    ),
    Case(
        name="divide-by-zero",
        attacks="the processor's own exception",
        code=_MACHINE_CODE + f"run(b'\\x31\\xc9\\x31\\xd2\\xf7\\xf1\\xc3' if {IS_X86} else bytes(4))",
        expect=either(killed("signal 8", ""), killed("signal 4", ""), killed("signal 11", "")),
    ),
    *(
        [
            Case(
                name="i386-syscall",
                attacks="a filter that knows the numbers of one architecture only: getpid by the 32-bit door",
                code=_MACHINE_CODE + "print(run(b'\\xb8\\x14\\0\\0\\0\\xcd\\x80\\xc3') > 0)",
                expect=either(killed("signal 31", ""), killed("policy", ""), stdout("False\n")),
                needs="seccomp",
                is_core=True,
            ),
            Case(
                name="x32-syscall",
                attacks="the same by the numbers of x32",
                code=LIBC + "print(libc.syscall(ctypes.c_long(39 | 0x40000000)) > 0)",
                expect=either(killed("signal 31", ""), killed("policy", ""), stdout("False\n")),
                needs="seccomp",
                is_core=True,
            ),
        ]
        if IS_X86
        else []
    ),
    Case(
        name="kill-parent",
        attacks="the process that started it",
        code=program("""
            import os
            try: os.kill(os.getppid(), 9)
            except OSError: pass
            print('alive')
        """),
        expect=either(stdout("alive\n"), killed("signal 9", "")),
        is_core=True,
    ),
    Case(
        name="kill-group",
        attacks="everything in its process group",
        code="import os\nos.kill(0, 9)\nprint('alive')",
        expect=either(stdout("alive\n"), killed("signal 9", "")),
        is_core=True,
    ),
    Case(
        name="kill-all",
        attacks="everything that it may signal",
        code=NOT_AS_ROOT + "try: os.kill(-1, 9)\nexcept OSError: pass\nprint('alive')",
        expect=either(stdout("alive\n"), killed("signal 9", "")),
        is_short=True,
    ),
    Case(
        name="kill-scan",
        attacks="every process id there is",
        code=NOT_AS_ROOT
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
        name="kill-host",
        attacks="the process of the service, by its number on the host",
        code=REFUSED + "import os, signal\nprint(refused(os.kill, HOST_PID, 9), refused(os.killpg, HOST_PID, 9))",
        expect=stdout("True True\n"),
        is_short=True,
    ),
    Case(
        name="kill-by-other-doors",
        attacks="rules that know `kill` only: sigqueue, tgkill and a pidfd, on the host and on the parent",
        code=LIBC
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
        name="owner-of-a-pipe",
        attacks="signals that the kernel sends for a descriptor: SIGIO to the parent and to the host",
        code=program("""
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
        name="timer-for-another",
        attacks="a timer whose signal goes to another thread id: the parent's",
        code=LIBC
        + program("""
            event = (ctypes.c_int * 16)()
            event[2], event[3], event[4] = 9, 4, os.getppid() or HOST_PID  # SIGKILL, SIGEV_THREAD_ID
            timer = ctypes.c_int()
            print(libc.timer_create(0, event, ctypes.byref(timer)))
        """),
        expect=stdout("-1\n"),
    ),
    Case(
        name="own-filter",
        attacks="the last words of the runner: a filter of the program's own kills its process at the next `write`",
        code=LIBC
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
        name="strict-mode",
        attacks="the same by seccomp's first mode, where even an orderly end is forbidden",
        code=LIBC + "print('in', flush=True)\nlibc.prctl(22, 1, 0, 0, 0)\nprint('still', flush=True)",
        expect=either(stdout("in\nstill\n"), *(killed(f"signal {number}", re.compile(r"\Ain\n")) for number in (9, 11, 31))),
    ),
    Case(
        name="handler-raises-late",
        attacks="the runner's own lines after the program: a timer whose handler raises, again and again",
        code=program("""
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
