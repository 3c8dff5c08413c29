"""The kernel's less used doors. Every call succeeds for an ordinary process, or fails for want of a right only."""

from __future__ import annotations

from ..case import Case, either, killed, program, stdout
from .preludes import IS_X86, LIBC, SYSCALLS


def _door(name: str, attacks: str, call: str, *, is_core: bool = True) -> Case:
    """`call` must be refused: by an error, which is -1 in C."""
    return Case(name, attacks, LIBC + f"print({call})", expect=stdout("-1\n"), needs="seccomp", is_core=is_core)


CASES = [
    _door("bpf", "programs inside the kernel", f"libc.syscall({SYSCALLS['bpf']}, 0, (ctypes.c_uint32 * 32)(1, 4, 4, 1), 128)"),
    _door(
        "perf-events",
        "the processor's counters, which tell what others do",
        f"libc.syscall({SYSCALLS['perf_event_open']}, (ctypes.c_uint32 * 32)(1, 128, 9, *[0] * 7, 0x61), 0, -1, -1, 0)",
    ),
    _door("kexec", "another kernel in place of this one", f"libc.syscall({SYSCALLS['kexec_load']}, 0, 0, None, 0)"),
    _door("modules", "modules of the kernel", f"libc.syscall({SYSCALLS['init_module']}, b'', 0, b'')"),
    _door("fanotify", "the files that others open, and the right to let them", "libc.fanotify_init(0x200, 0)"),
    _door("memory-files", "memory that no limit counts, and programs without a file", "libc.memfd_create(b'x', 0)"),
    _door(
        "vmsplice",
        "pages of one's own in a pipe that another reads",
        "libc.vmsplice(1, (ctypes.c_size_t * 2)(id(libc), 1), 1, 0)",
    ),
    _door(
        "io-priority",
        "the disk's time: the idle class for all processes of its user",
        f"libc.syscall({SYSCALLS['ioprio_set']}, 3, os.getuid(), 3 << 13)",
    ),
    _door(
        "move-pages",
        "the memory of others, page by page",
        f"libc.syscall({279 if IS_X86 else 239}, 0, 0, None, None, None, 0)",
        is_core=False,
    ),
    _door("queues", "POSIX message queues", "libc.mq_open(b'/own', 0o102, 0o600, None)"),
    _door("shared-memory", "System V shared memory", "libc.shmget(0, 4096, 0o1600)"),
    _door("semaphores", "System V semaphores", "libc.semget(0, 1, 0o1600)"),
    _door("message-queues", "System V message queues", "libc.msgget(0, 0o1600)"),
    *(
        [
            _door(
                "modify-ldt",
                "the processor's own tables",
                f"libc.syscall({SYSCALLS['modify_ldt']}, 0, ctypes.create_string_buffer(16), 16)",
            )
        ]
        if IS_X86
        else []
    ),
    Case(
        "exec-from-memory",
        "rules about files: a program that never was one",
        program("""
            import os
            try:
                fd = os.memfd_create('x')
                os.write(fd, open('/bin/true', 'rb').read())
                pid = os.fork()
                if pid == 0: os.execve(fd, ['x'], {})
                print(os.waitpid(pid, 0)[1])
            except OSError: print('refused')
        """),
        expect=stdout("refused\n"),
        needs="seccomp",
        is_core=True,
    ),
    Case(
        "own-rules",
        "the rules by more of them: what a program adds may only take away",
        LIBC
        + program("""
            import struct
            allow = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7FFF0000))
            libc.prctl(22, 2, struct.pack('HxxxxxxQ', 1, ctypes.addressof(allow)), 0, 0)
            print(libc.unshare(0x10000000), libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))
        """),
        expect=stdout("-1 -1\n"),
        is_core=True,
    ),
    Case(
        "rules-with-a-listener",
        "the same with an answering process, which could answer for others",
        LIBC
        + program(f"""
            import struct
            allow = ctypes.create_string_buffer(struct.pack('HBBI', 6, 0, 0, 0x7FFF0000))
            fd = libc.syscall({317 if IS_X86 else 277}, 1, 8, struct.pack('HxxxxxxQ', 1, ctypes.addressof(allow)))
            print(libc.unshare(0x10000000))
        """),
        expect=stdout("-1\n"),
    ),
    Case(
        "unknown-syscalls",
        "a list of what is forbidden, by what came after it was written",
        LIBC
        + program("""
            import errno
            odd = []
            for number in range(470, 1024):
                result = libc.syscall(number, -1, -1, -1, -1, -1, -1)
                if result != -1 or ctypes.get_errno() not in (errno.ENOSYS, errno.EPERM): odd.append(number)
            print(odd)
        """),
        expect=either(stdout("[]\n"), killed("signal 31"), killed("policy")),
        needs="seccomp that refuses the numbers it does not know",
    ),
]
