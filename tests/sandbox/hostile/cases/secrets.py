"""Programs that look for secrets of the service, its environment and memory, of the previous call and of a concurrent call."""

from __future__ import annotations

import re

from ..case import Case, program, stdout
from .preludes import LIBC, REFUSED, SYSCALLS

CASES = [
    Case(
        "environment",
        "the environment of the process that started the sandbox",
        "import os\nprint(*(f'{name}={value}' for name, value in os.environ.items()), sep='\\n')",
        expect=stdout(re.compile(r"\APATH=")),
        is_short=True,
    ),
    Case(
        "environment-in-c",
        "the same where Python does not look: the C library's, and the stack it came on",
        LIBC
        + program("""
            environ = ctypes.POINTER(ctypes.c_char_p).in_dll(libc, 'environ')
            n = 0
            while environ[n]:
                print(environ[n].decode())
                n += 1
        """),
        expect=stdout(re.compile(r"PATH=")),
        is_core=True,
    ),
    Case(
        "arguments",
        "the command line of the process that started the sandbox",
        "import sys\nprint(sys.argv, sys.flags.interactive)",
        expect=stdout("[''] 0\n"),
    ),
    Case(
        "heap",
        "what the call before left in the memory that this one inherited",
        LIBC
        + program("""
            libc.sbrk.restype = ctypes.c_void_p
            end = libc.sbrk(0)
            read, write = os.pipe2(os.O_NONBLOCK)
            found = set()
            word = ('can' + 'ary').encode() + b'-'
            for at in range(end - 4096, end - (64 << 20), -4096):
                if libc.write(write, ctypes.c_void_p(at), 4096) != 4096: break  # EFAULT, where reading would be a crash
                page = os.read(read, 4096)
                where = page.find(word)
                if where >= 0: found.add(page[where : where + 30])
            print(found or 'nothing')
        """),
        expect=stdout("nothing\n"),
        is_short=True,
    ),
    Case(
        "objects",
        "the same among the objects of the interpreter, and in the frames of the runner",
        program("""
            import gc, sys
            word = ''.join(['can', 'ary-'])
            seen, todo = set(), [*gc.get_objects(), *sys._current_frames().values(), sys.modules]
            frame = sys._getframe()
            while frame:
                todo.append(frame.f_locals)
                frame = frame.f_back
            while todo and len(seen) < 300_000:
                thing = todo.pop()
                if id(thing) in seen: continue
                seen.add(id(thing))
                if type(thing) in (str, bytes, bytearray) and word in str(thing) and thing != word: print('found', thing)
                elif type(thing) not in (int, float): todo += gc.get_referents(thing)
            print('searched')
        """),
        expect=stdout("searched\n"),
        wall_s=30.0,
        is_core=True,
    ),
    Case(
        "descriptors-read",
        "what the descriptors still hold: the program and the input of others",
        program("""
            import os
            for fd in range(3, 1024):
                try: print(fd, os.pread(fd, 1 << 20, 0))
                except OSError: pass
            print('done')
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "fresh-memory",
        "memory that the kernel hands out before it is cleared",
        "import mmap\nm = mmap.mmap(-1, 64 << 20)\nprint(any(m[:]), any(bytearray(1 << 20)))",
        expect=stdout("False False\n"),
    ),
    Case(
        "fresh-files",
        "the same on disk: a hole in a file, and blocks that were never written",
        program("""
            import os
            with open('f', 'w+b') as f:
                f.truncate(8 << 20)
                os.posix_fallocate(f.fileno(), 0, 8 << 20)
                print(any(f.read()))
        """),
        expect=stdout("False\n"),
    ),
    Case(
        "trace-parent",
        "the memory and the registers of the parent and of the service",
        LIBC
        + program("""
            for pid in (HOST_PID, os.getppid() or HOST_PID, 1 if os.getpid() != 1 else HOST_PID):
                print(libc.ptrace(16, pid, None, None), libc.ptrace(0x4206, pid, None, None), end=' ')  # ATTACH, SEIZE
        """),
        expect=stdout("-1 -1 " * 3),
        is_core=True,
    ),
    Case(
        "read-parent",
        "the same without stopping it",
        LIBC
        + program("""
            buffer = ctypes.create_string_buffer(16)
            local = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 16)
            remote = (ctypes.c_size_t * 2)(id(None), 16)
            for pid in (HOST_PID, os.getppid() or HOST_PID):
                print(libc.process_vm_readv(pid, local, 1, remote, 1, 0), libc.process_vm_writev(pid, local, 1, remote, 1, 0))
        """),
        expect=stdout("-1 -1\n" * 2),
        is_short=True,
    ),
    Case(
        "trace-child",
        "the rules themselves: a traced child may be made to call what it likes",
        LIBC
        + program("""
            pid = os.fork()
            if pid == 0:
                libc.ptrace(0, 0, None, None)
                os._exit(0 if ctypes.get_errno() == 0 else 1)
            print(os.waitpid(pid, 0)[1] != 0)
        """),
        expect=stdout("True\n"),
        needs="seccomp",
    ),
    Case(
        "read-own-child",
        "the same by reading and writing a child's memory, and taking its descriptors",
        LIBC
        + program(f"""
            import time
            pid = os.fork()
            if pid == 0: time.sleep(60)
            buffer = ctypes.create_string_buffer(16)
            vector = (ctypes.c_size_t * 2)(ctypes.addressof(buffer), 16)
            print(libc.process_vm_readv(pid, vector, 1, vector, 1, 0))
            print(libc.syscall({SYSCALLS["kcmp"]}, os.getpid(), pid, 2, 0, 0))
            print(libc.syscall({SYSCALLS["pidfd_getfd"]}, libc.syscall({SYSCALLS["pidfd_open"]}, pid, 0), 1, 0))
        """),
        expect=stdout("-1\n" * 3),
        needs="seccomp",
    ),
    Case(
        "concurrent-call",
        "a concurrent call: its processes, by every number there is",
        LIBC
        + program("""
            import time
            time.sleep(0.1)
            found = [pid for pid in range(2, 70_000) if libc.getpgid(pid) >= 0 or libc.getsid(pid) >= 0]
            print([pid for pid in found if pid != os.getpid() and libc.ptrace(16, pid, None, None) == 0])
        """),
        alongside=program("""
            secret = 'canary-alongside'
            import time
            time.sleep(0.4)
            print('untouched')
        """),
        alongside_text="untouched\n",
        expect=stdout("[]\n"),
        is_core=True,
    ),
    Case(
        "concurrent-call-files",
        "a concurrent call: its working directory, wherever it may lie",
        program("""
            import glob, os, time
            time.sleep(0.1)
            for pattern in ('/tmp/*/*', '/tmp/*', '/dev/shm/*', '/run/*/*', '/var/tmp/*', '../*/*', '/proc/*/cwd/*'):
                for path in glob.glob(pattern):
                    try:
                        if 'be' + 'side' in open(path).read(): print('read', path)
                    except (OSError, ValueError): continue
            print('done')
        """),
        alongside=program("""
            import time
            for path in ('f', '/tmp/f', '/dev/shm/f'):
                try: open(path, 'w').write('alongside')
                except OSError: pass
            time.sleep(0.4)
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "keys-left",
        "the kernel's key rings as a mailbox",
        before=(
            LIBC + f"print(libc.syscall({SYSCALLS['add_key']}, b'user', b'mailbox', b'left', 4, -4))",  # the user's ring
        ),
        code=LIBC
        + program(f"""
            print(libc.syscall({SYSCALLS["add_key"]}, b'user', b'own', b'x', 1, -4))
            print(libc.syscall({SYSCALLS["keyctl"]}, 10, -4, b'user', b'mailbox', 0))
            print(libc.syscall({SYSCALLS["request_key"]}, b'user', b'mailbox', None, 0))
        """),
        expect=stdout("-1\n-1\n-1\n"),
        needs="seccomp",
    ),
    Case(
        "system-v-left",
        "System V memory, semaphores and queues as a mailbox",
        before=(LIBC + "print(libc.shmget(77, 4096, 0o1666), libc.semget(77, 1, 0o1666), libc.msgget(77, 0o1666))",),
        code=LIBC + "print(libc.shmget(77, 4096, 0), libc.semget(77, 1, 0), libc.msgget(77, 0))",
        expect=stdout("-1 -1 -1\n"),
        is_short=True,
    ),
    Case(
        "posix-queue-left",
        "POSIX message queues as a mailbox",
        before=(LIBC + "print(libc.mq_open(b'/left', 0o102, 0o666, None))",),
        code=LIBC + "print(libc.mq_open(b'/left', 2))",
        expect=stdout("-1\n"),
        is_core=True,
    ),
    Case(
        "abstract-mailbox",
        "abstract sockets as a mailbox between calls that run at the same time",
        program("""
            import socket, time
            try:
                s = socket.socket(socket.AF_UNIX)
                s.bind('\\0mailbox')
                s.listen()
                s.settimeout(0.5)
                s.accept()[0].send(b'taken')
                print('a letter came')
            except OSError: print('nothing came')
        """),
        alongside=program("""
            import socket, time
            for _ in range(40):
                time.sleep(0.01)
                try:
                    s = socket.socket(socket.AF_UNIX)
                    s.connect('\\0mailbox')
                except OSError: continue
                print(s.recv(9))
        """),
        expect=stdout("nothing came\n"),
        needs="seccomp, Landlock or a network namespace of each call's own",
        is_core=True,
    ),
    Case(
        "timing-of-host",
        "the machine's uptime, name and users",
        REFUSED
        + program("""
            import os, socket
            print(refused(open, '/proc/uptime'), refused(open, '/proc/stat'), refused(open, '/var/run/utmp'))
        """),
        expect=stdout("True True True\n"),
    ),
    Case(
        "kernel-log",
        "the kernel's log",
        LIBC
        + program(f"""
            buffer = ctypes.create_string_buffer(4096)
            print(libc.syscall({SYSCALLS["syslog"]}, 3, buffer, 4096), libc.syscall({SYSCALLS["syslog"]}, 10, None, 0))
        """),
        expect=stdout("-1 -1\n"),
        is_core=True,
    ),
]
