"""Programs that fill the disk, its table of files or the patience of the cleanup."""

from __future__ import annotations

import re

from strop.sandbox import IsolationLevel

from ..case import Case, either, empty, error, program, stdout
from .preludes import LIBC

NAMESPACES = IsolationLevel.NAMESPACES

CASES = [
    Case(
        "disk-one-file",
        "the disk by one file",
        "with open('big', 'wb') as f:\n    while True: f.write(bytes(1 << 20))",
        expect=error("OSError: [Errno 27] File too large"),
        is_core=True,
    ),
    Case(
        "disk-many",
        "the disk by files of 8 MB, each within the limit of a file",
        program("""
            import errno
            try:
                for n in range(1000):
                    with open(str(n), 'wb') as f: f.write(bytes(8 << 20))
            except OSError as e: print(errno.errorcode[e.errno], n < 20)
        """),
        wall_s=3.0,
        holds_from=NAMESPACES,  # there is no quota below it
        expect=stdout("ENOSPC True\n"),
        is_short=True,
    ),
    Case(
        "inode-flood",
        "the table of files by empty ones",
        program("""
            import errno
            try:
                for n in range(1_000_000): open(str(n), 'w').close()
            except OSError as e: print(errno.errorcode[e.errno], n < 5000)
        """),
        wall_s=5.0,
        holds_from=NAMESPACES,  # there is no quota below it
        expect=stdout("ENOSPC True\n"),
        is_core=True,
    ),
    Case(
        "link-flood",
        "the same by names: a file with many, and links that lead nowhere",
        program("""
            import os
            open('f', 'w').close()
            try:
                for n in range(1_000_000): os.link('f', f'hard{n}')
            except OSError: print('refused')
        """),
        wall_s=5.0,
        holds_from=NAMESPACES,  # there is no quota below it
        expect=stdout("refused\n"),
    ),
    Case(
        "long-names",
        "the memory of names: four thousand of 255 bytes",
        program("""
            import os
            try:
                for n in range(1_000_000): os.symlink('x' * 4000, str(n).rjust(255, 'n'))
            except OSError: print('refused')
        """),
        wall_s=5.0,
        holds_from=NAMESPACES,  # there is no quota below it
        expect=stdout("refused\n"),
    ),
    Case(
        "sparse-file",
        "code that adds up sizes: a file of a terabyte without a block",
        "try:\n    with open('f', 'wb') as f: f.truncate(1 << 40)\nexcept OSError as e: print(e)",
        holds_from=NAMESPACES,  # there is no quota below it
        expect=stdout("[Errno 27] File too large\n"),
    ),
    Case(
        "sparse-files",
        "the same by many that are just small enough",
        "for n in range(500):\n    with open(str(n), 'wb') as f: f.truncate(15 << 20)\nprint('made')",
        holds_from=NAMESPACES,  # there is no quota below it
        expect=stdout("made\n"),
    ),
    Case(
        "fallocate",
        "the disk by blocks that are asked for and never written",
        program("""
            import os
            held = [open(str(n), 'wb') for n in range(20)]
            try:
                for f in held: os.posix_fallocate(f.fileno(), 0, 15 << 20)
            except OSError: print('refused')
        """),
        holds_from=NAMESPACES,  # there is no quota below it
        expect=stdout("refused\n"),
    ),
    Case(
        "deleted-but-open",
        "code that looks for large files by name",
        program("""
            import os
            held = []
            try:
                for n in range(100):
                    held.append(open('f', 'wb'))
                    os.unlink('f')
                    held[-1].write(bytes(8 << 20))
                    held[-1].flush()
            except OSError: print('refused')
        """),
        holds_from=NAMESPACES,  # there is no quota below it
        expect=stdout("refused\n"),
    ),
    Case(
        "deleted-and-mapped",
        "the same without even a descriptor: only a map holds it",
        program("""
            import mmap, os
            held = []
            try:
                for n in range(100):
                    with open('f', 'w+b') as f:
                        f.write(bytes(8 << 20))
                        f.flush()
                        held.append(mmap.mmap(f.fileno(), 0))
                    os.unlink('f')
            except OSError: print('refused')
        """),
        expect=stdout("refused\n"),
        holds_from=NAMESPACES,  # there is no quota below it
    ),
    Case(
        "deep-tree",
        "the recursion of code that deletes: three thousand directories, one in the other",
        program("""
            import os
            for n in range(3000):
                os.mkdir('d')
                os.chdir('d')
            open('bottom', 'w').close()
            print('dug')
        """),
        expect=stdout("dug\n"),
        is_core=True,
    ),
    Case(
        "wide-tree",
        "the time of code that deletes",
        program("""
            import os
            for n in range(50):
                os.mkdir(str(n))
                for m in range(50): open(f'{n}/{m}', 'w').close()
            print('made')
        """),
        expect=stdout("made\n"),
    ),
    Case(
        "symlink-loops",
        "code that follows links while deleting: circles, and one that leads to the host's directory",
        program("""
            import os
            os.symlink('b', 'a')
            os.symlink('a', 'b')
            os.symlink('.', 'here')
            os.symlink('/', 'root')
            os.symlink(HOST_OPEN_DIRECTORY, 'open')
            print('linked')
        """),
        expect=stdout("linked\n"),
        is_core=True,
    ),
    Case(
        "odd-names",
        "code that lists or deletes by name: newlines, bytes that are no text, options",
        program("""
            import os
            for name in (b'a\\nb', b'\\xff\\xfe', b'-rf', b'*', b' ', b'~', b'\\x1b[2J', b'...', '‮'.encode()):
                os.mkdir(name)
                os.mkdir(os.path.join(name, name))
            print('named')
        """),
        expect=stdout("named\n"),
    ),
    Case(
        "closed-directories",
        "code that deletes without rights: no user may read, write or enter",
        program("""
            import os
            os.makedirs('a/b/c')
            open('a/b/c/f', 'w').close()
            for path in ('a/b/c/f', 'a/b/c', 'a/b', 'a', '.'):
                try: os.chmod(path, 0)
                except OSError: pass
            print('closed')
        """),
        expect=stdout("closed\n"),
        is_core=True,
    ),
    Case(
        "sticky-setgid",
        "the same by unexpected modes",
        program("""
            import os
            os.mkdir('d')
            for mode in (0o7777, 0o1000, 0o2000, 0o4000): os.chmod('d', mode)
            print('set')
        """),
        expect=either(stdout("set\n"), error(re.compile("PermissionError"))),
    ),
    Case(
        "immutable",
        "code that deletes: a file that cannot be, even by root",
        program("""
            import fcntl, os, struct
            f = os.open('f', os.O_CREAT | os.O_RDWR)
            try: fcntl.ioctl(f, 0x40086602, struct.pack('l', 0x10))  # FS_IOC_SETFLAGS, FS_IMMUTABLE_FL
            except OSError: print('refused')
        """),
        expect=stdout("refused\n"),
    ),
    Case(
        "chown",
        "code that deletes: files that belong to another user",
        program("""
            import os
            open('f', 'w').close()
            for uid in (0, 65534, 1_000_001):
                try: os.chown('f', uid, uid)
                except OSError: print('refused')
        """),
        expect=stdout("refused\n" * 3),
    ),
    Case(
        "xattr-flood",
        "memory of the kernel by attributes of a file",
        program("""
            import os
            open('f', 'w').close()
            try:
                for n in range(100_000): os.setxattr('f', f'user.{n}', bytes(1000))
            except OSError: print('refused')
        """),
        expect=stdout("refused\n"),
        is_core=True,
    ),
    Case(
        "file-locks",
        "memory of the kernel by locks on single bytes",
        program("""
            import fcntl
            f = open('f', 'w+b')
            try:
                for n in range(5_000): fcntl.lockf(f, fcntl.LOCK_EX, 1, n * 2)
            except OSError: pass
            print('locked')
        """),
        expect=stdout("locked\n"),
    ),
    Case(
        "inotify-flood",
        "the watches that all programs of a user share",
        LIBC
        + program("""
            for n in range(100):
                os.mkdir(str(n))
            watch = libc.inotify_init()
            print(len([n for n in range(100) if libc.inotify_add_watch(watch, str(n).encode(), 0xFFF) >= 0]) in (0, 100))
        """),
        expect=stdout("True\n"),
    ),
    Case(
        "open-flood",
        "the machine's table of open files",
        program("""
            held = []
            try:
                while len(held) < 100_000: held.append(open('f', 'w'))
            except OSError as e: print(e.errno, len(held) < 1100)
        """),
        expect=stdout("24 True\n"),
        is_core=True,
    ),
    Case(
        "open-flood-by-children",
        "the same by every process it may have",
        program("""
            import os, time
            open('f', 'w').close()
            for _ in range(20):
                if os.fork() == 0:
                    try: held = [open('f') for _ in range(100_000)]
                    except OSError: time.sleep(60)
            time.sleep(0.2)
            print('opened')
        """),
        expect=stdout("opened\n"),
    ),
    Case(
        "rename-storm",
        "code that walks the tree at the same moment",
        program("""
            import os, time
            os.makedirs('a/x')
            os.makedirs('b')
            if os.fork() == 0:
                while True:
                    os.rename('a/x', 'b/x')
                    os.rename('b/x', 'a/x')
            time.sleep(0.1)
            print('moved')
        """),
        expect=stdout("moved\n"),
        is_core=True,
    ),
    Case(
        "write-at-the-end",
        "code that cleans up before the last process has ended",
        program("""
            import os
            if os.fork() == 0:
                try: os.setsid()
                except OSError: pass
                n = 0
                while True:
                    n += 1
                    try: os.mkdir(f'late{n}')
                    except OSError: n = 0
            os._exit(0)
        """),
        expect=empty(),
        is_core=True,
    ),
    Case(
        "work-directory-gone",
        "the place where it runs: removed under its feet",
        program("""
            import os
            here = os.getcwd()
            try:
                os.rmdir(here)
                open('f', 'w')
            except OSError: print('refused')
        """),
        expect=stdout("refused\n"),
    ),
    Case(
        "core-dump",
        "the disk, and the secrets in memory, by a dump of a crash",
        program("""
            import os, resource, signal
            try: resource.setrlimit(resource.RLIMIT_CORE, (-1, -1))
            except (OSError, ValueError): pass
            pid = os.fork()
            if pid == 0: os.kill(os.getpid(), signal.SIGSEGV)
            status = os.waitpid(pid, 0)[1]
            print(os.WCOREDUMP(status), os.listdir('.'))
        """),
        expect=stdout("False []\n"),
        is_core=True,
    ),
]
