"""Programs that want more memory than they may have, by every way to it. An honest limit is an error that the program sees."""

from __future__ import annotations

import re

from ..case import Case, echo, either, error, killed, program, stdout, timeout
from .preludes import LIBC, SYSCALLS

MEMORY_MIB = 128

# Eight processes, each within the limit of one; together three times what a call may hold.
_HOG = program("""
    import mmap, os, time
    def hog(flags):
        try:
            held = mmap.mmap(-1, 100 << 20, flags)
            for at in range(0, len(held), 4096): held[at] = 1
        except (OSError, MemoryError): pass
        time.sleep(60)
    def hogs(flags, count=8):
        for _ in range(count):
            if os.fork() == 0: hog(flags)
""")

CASES = [
    Case(
        "mem-list",
        "memory by a list that grows",
        "x = []\nwhile True: x.append('x' * (1 << 20) + str(len(x)))",
        memory_mib=MEMORY_MIB,
        expect=error("MemoryError"),
        is_short=True,
    ),
    Case("mem-string", "memory by one request larger than the machine", "'a' * (1 << 46)", expect=error("MemoryError")),
    Case(
        "mem-caught",
        "memory by a program that goes on when it is refused",
        program("""
            x = []
            while True:
                try: x.append(bytes(1 << 20))
                except MemoryError: pass
        """),
        memory_mib=MEMORY_MIB,
        wall_s=1.0,
        expect=timeout(""),
    ),
    Case(
        "mem-full-at-the-end",
        "the runner's own lines after the program: not a byte is left for them",
        program("""
            x = []
            for size in (1 << 20, 1 << 12, 1 << 8):
                try:
                    while True: x.append(bytes(size))
                except MemoryError: pass
            len(x) > 50
        """),
        memory_mib=64,
        expect=either(echo("True"), error(re.compile("MemoryError"))),
    ),
    Case(
        "mem-limit-lowered",
        "the same by a limit that the program sets for itself",
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))\nx = 'a' * (1 << 22)",
        expect=error(re.compile("MemoryError")),
        is_core=True,
    ),
    Case(
        "mem-numpy",
        "memory by one array",
        "import numpy as np\nnp.ones((1 << 17, 1 << 17))",
        expect=error(re.compile(r"MemoryError: Unable to allocate 128. GiB")),
        is_core=True,
    ),
    Case(
        "mem-mmap",
        "address space by an anonymous map",
        "import mmap\nmmap.mmap(-1, 8 << 30)",
        expect=error(re.compile(r"(OSError: \[Errno 12\] Cannot allocate memory|MemoryError)\n\Z")),
        is_short=True,
    ),
    Case(
        "mem-noreserve",
        "the same by a map that promises to use nothing",
        LIBC + "libc.mmap.restype = ctypes.c_long\nprint(libc.mmap(None, ctypes.c_size_t(1 << 40), 0, 0x4022, -1, 0))",
        expect=stdout("-1\n"),
    ),
    Case(
        "mem-many-maps",
        "the kernel's table of maps",
        program("""
            import mmap
            held = []
            try:
                for n in range(200_000): held.append(mmap.mmap(-1, 4096, prot=1 + n % 2 * 2))
            except (OSError, MemoryError): print('refused')
            else: print(len(held))
        """),
        expect=stdout("refused\n"),
    ),
    Case(
        "mem-memfd",
        "memory beyond the address space: a file in memory, written to",
        program("""
            import os
            total = 0
            try:
                files = [os.memfd_create(str(n)) for n in range(100)]
                for f in files:
                    for _ in range(15): total += os.write(f, bytes(1 << 20))
            except (OSError, AttributeError): pass
            print(total < 100 << 20)
        """),
        expect=either(stdout("True\n"), killed("memory")),
        needs="seccomp (memfd_create) or the memory watchdog",
        is_core=True,
    ),
    Case(
        "mem-memfd-secret",
        "the same by a file that is taken out of the kernel's own map",
        LIBC + f"print(libc.syscall({SYSCALLS['memfd_secret']}, 0))",
        expect=stdout("-1\n"),
    ),
    Case(
        "mem-shm",
        "the same by shared memory",
        program("""
            import errno
            try:
                for n in range(1000):
                    with open(f'/dev/shm/{n}', 'wb') as f: f.write(bytes(8 << 20))
            except OSError as e: print(errno.errorcode[e.errno], n < 20)
        """),
        expect=either(stdout("ENOSPC True\n"), stdout(re.compile(r"\A(EACCES|ENOENT|EPERM|EDQUOT) True\n")), killed("disk")),
        is_core=True,
    ),
    Case(
        "mem-shm-map",
        "the same through a map, where a full file system is a signal",
        program("""
            import mmap, os
            f = open('sparse', 'w+b')
            f.truncate(15 << 20)
            others = [open(f'filler{n}', 'wb') for n in range(8)]
            try:
                for o in others:
                    for _ in range(15): o.write(bytes(1 << 20))
                    o.flush()
            except OSError: pass
            m = mmap.mmap(f.fileno(), 15 << 20)
            print('mapped', flush=True)
            for at in range(0, len(m), 4096): m[at] = 1
            print('written')
        """),
        expect=either(killed("signal 7", "mapped\n"), stdout("mapped\nwritten\n"), killed("disk")),
    ),
    Case(
        "mem-pipes",
        "kernel memory by pipes that are filled and never read",
        program("""
            import fcntl, os
            total = 0
            try:
                while True:
                    read, write = os.pipe2(os.O_NONBLOCK)
                    try: fcntl.fcntl(write, 1031, 1 << 20)  # F_SETPIPE_SZ
                    except OSError: pass
                    try:
                        while True: total += os.write(write, bytes(1 << 16))
                    except BlockingIOError: pass
            except OSError: print(0 < total < 200 << 20)
        """),
        expect=stdout("True\n"),
    ),
    Case(
        "mem-pipes-of-others",
        "what all calls of one user share: the pages that its pipes may hold",
        program("""
            import fcntl, os, time
            held, _ = [], os.fork()
            try:
                while True:
                    held.append(os.pipe2(os.O_NONBLOCK))
                    fcntl.fcntl(held[-1][1], 1031, 1 << 20)  # F_SETPIPE_SZ
            except OSError: pass
            time.sleep(0.4)
            os.write(1, b'held')
            time.sleep(0.2)
        """),
        alongside=program("""
            import os, time
            time.sleep(0.2)
            read, write = os.pipe2(os.O_NONBLOCK)
            print(os.write(write, bytes(60_000)))
        """),
        alongside_text="60000\n",
        expect=stdout("heldheld"),
        needs="a user of each call's own",
    ),
    Case(
        "mem-sockets",
        "kernel memory by pairs of sockets that are filled and never read",
        program("""
            import socket
            held, total = [], 0
            try:
                while True:
                    held.append(socket.socketpair())
                    a = held[-1][0]
                    try: a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                    except OSError: pass
                    a.setblocking(False)
                    try:
                        while True: total += a.send(bytes(1 << 14))
                    except BlockingIOError: pass
            except OSError: print(total < 200 << 20)
        """),
        expect=stdout("True\n"),
    ),
    Case(
        "mem-descriptors-in-flight",
        "the limit on descriptors: they are sent to a socket that no process reads, and closed here",
        program("""
            import os, socket
            count = 0
            held = []
            try:
                while count < 1_000_000:
                    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
                    a.setblocking(False)
                    held.append((a, b))
                    for _ in range(20):
                        socket.send_fds(a, [b'x'], [0] * 50)
                        count += 50
            except OSError: print(count < 20_000)
        """),
        expect=stdout("True\n"),
    ),
    Case(
        "mem-epoll",
        "kernel memory by watches",
        program("""
            import os, select
            try:
                polls = [select.epoll() for _ in range(1000)]
            except OSError as e: print(e.errno)
        """),
        expect=stdout("24\n"),
    ),
    Case(
        "mem-forks",
        "memory by many processes, each within its own limit",
        _HOG + "hogs(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\ntime.sleep(60)",
        memory_mib=MEMORY_MIB,
        wall_s=8.0,
        expect=killed("memory"),
        needs="the memory watchdog",
        is_core=True,
    ),
    Case(
        "mem-forks-shared",
        "the same by memory that counts as shared, though no other process maps it",
        _HOG + "hogs(mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)\ntime.sleep(60)",
        memory_mib=MEMORY_MIB,
        wall_s=8.0,
        expect=killed("memory"),
        needs="the memory watchdog",
        is_core=True,
    ),
    Case(
        "mem-forks-orphaned",
        "the same by processes whose parent has ended, so that they are below somebody else",
        _HOG + "if os.fork() == 0:\n    hogs(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\n    os._exit(0)\ntime.sleep(60)",
        memory_mib=MEMORY_MIB,
        wall_s=8.0,
        expect=killed("memory"),
        needs="the memory watchdog",
        is_core=True,
    ),
    Case(
        "mem-forks-undumpable",
        "the same by processes whose maps only root may read",
        _HOG + LIBC + "libc.prctl(4, 0, 0, 0, 0)\nhogs(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)\ntime.sleep(60)",
        memory_mib=MEMORY_MIB,
        wall_s=8.0,
        expect=killed("memory"),
        needs="the memory watchdog",
        is_core=True,
    ),
    Case(
        "mem-forks-then-exit",
        "the same, and the program itself has ended long before",
        _HOG + "hogs(mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 2)\ntime.sleep(0.05)\nprint('left them')",
        memory_mib=MEMORY_MIB,
        expect=stdout("left them\n"),
    ),
    Case(
        "mem-fork-copies",
        "the same by writing to pages that forks share",
        program("""
            import os, time
            held = bytearray(100 << 20)
            for _ in range(8):
                if os.fork() == 0:
                    for at in range(0, len(held), 4096): held[at] = 1
                    time.sleep(60)
            time.sleep(60)
        """),
        memory_mib=MEMORY_MIB,
        wall_s=8.0,
        expect=killed("memory"),
        needs="the memory watchdog",
    ),
    Case(
        "mem-huge-teardown",
        "code that waits for the end of a program: half a gigabyte takes long to give back",
        program("""
            held = bytearray(1 << 29)
            for at in range(0, len(held), 4096): held[at] = 1
            print('full', flush=True)
            while True: pass
        """),
        memory_mib=700,
        wall_s=2.0,
        expect=timeout("full\n"),
        is_core=True,
    ),
    Case(
        "mem-oom-score",
        "the kernel's choice of whom to end when memory is out",
        program("""
            for path in ('/proc/self/oom_score_adj', '/proc/1/oom_score_adj', '/proc/%d/oom_score_adj' % HOST_PID):
                try:
                    with open(path, 'w') as f: f.write('-1000')
                except OSError: print('refused')
        """),
        expect=stdout("refused\n" * 3),
        is_core=True,
    ),
    Case(
        "mem-lock",
        "memory that cannot be swapped or moved",
        LIBC + "held = ctypes.create_string_buffer(1 << 22)\nprint(libc.mlock(held, 1 << 22), libc.mlockall(3))",
        expect=stdout("-1 -1\n"),
    ),
    Case(
        "mem-stack",
        "memory by a stack whose limit is lifted",
        program("""
            import resource
            limit = resource.getrlimit(resource.RLIMIT_STACK)[1]
            print(limit == -1)
            try: resource.setrlimit(resource.RLIMIT_STACK, (-1, -1))
            except ValueError: print('refused')
        """),
        expect=stdout("False\nrefused\n"),
        needs="a limit on the stack",
    ),
    Case(
        "mem-zip-bomb",
        "memory by a few bytes that unpack to half a gigabyte",
        program("""
            import zlib
            packer = zlib.compressobj(1)
            packed = b''.join(packer.compress(bytes(1 << 20)) for _ in range(512)) + packer.flush()
            zlib.decompress(packed)
        """),
        memory_mib=MEMORY_MIB,
        wall_s=30.0,
        expect=error(re.compile("MemoryError|Error -4")),
    ),
    Case(
        "mem-no-collector",
        "memory in cycles that are not collected",
        program("""
            import gc
            gc.disable()
            while True:
                x = [bytes(1 << 16)]
                x.append(x)
        """),
        memory_mib=MEMORY_MIB,
        expect=error("MemoryError"),
    ),
    Case(
        "mem-exact-limit",
        "an honest program that uses most of what it may",
        "x = bytearray(100 << 20)\nprint(len(x))",
        memory_mib=MEMORY_MIB,
        expect=stdout("104857600\n"),
    ),
    Case(
        "mem-userfault",
        "page faults that the program answers itself, or never",
        LIBC + f"print(libc.syscall({SYSCALLS['userfaultfd']}, 1))",
        expect=stdout("-1\n"),
        needs="seccomp",
    ),
]
