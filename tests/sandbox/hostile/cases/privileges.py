"""Programs that want to be somebody else: root, without limits, in other namespaces, or trusted by a setuid binary."""

from __future__ import annotations

import re

from ..case import CONFINED, NAMESPACES, Case, either, killed, program, stdout
from .preludes import LIBC, REFUSED, SYSCALLS

_NEW_NAMESPACES = {
    "user": 0x10000000,
    "mount": 0x00020000,
    "pid": 0x20000000,
    "net": 0x40000000,
    "ipc": 0x08000000,
    "uts": 0x04000000,
    "cgroup": 0x02000000,
    "time": 0x00000080,
}

CASES = [
    Case(
        "set-ids",
        "the ids it runs with: back to root, or to another call's",
        REFUSED
        + program("""
            import os
            print(os.getuid() != 0, os.getresuid() == (os.getuid(),) * 3, os.getgroups() in ([], [os.getgid()], [65534]))
            for call in (os.setuid, os.setgid, os.seteuid, os.setegid):
                for number in (0, 1_000_000, 65534, os.getuid() + 1): print(refused(call, number), end=' ')
            print(refused(os.setgroups, [0]), refused(os.setresuid, -1, 0, 0), refused(os.initgroups, 'root', 0))
        """),
        expect=stdout("True True True\n" + "True " * 16 + "True True True\n"),
        is_short=True,
    ),
    Case(
        "capabilities",
        "what is left of root's rights",
        LIBC
        + program("""
            header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
            libc.capget(header, data)
            print([*data])
            print(libc.capset(header, (ctypes.c_uint32 * 6)(1 << 21, 1 << 21, 1 << 21)))
            print(libc.prctl(47, 2, 21, 0, 0), libc.prctl(39, 0, 0, 0, 0))  # ambient capabilities; no_new_privs is set
        """),
        expect=stdout("[0, 0, 0, 0, 0, 0]\n-1\n-1 1\n"),
        # Where Python lies in a closed home: CAP_DAC_READ_SEARCH, by which it may enter directories that Landlock allows.
        at={CONFINED: either(stdout("[0, 0, 0, 0, 0, 0]\n-1\n-1 1\n"), stdout("[4, 4, 4, 0, 0, 0]\n-1\n-1 1\n"))},
        is_short=True,
    ),
    Case(
        "setuid-binaries",
        "rights by the programs that give them: su, mount and their like",
        program("""
            import os, subprocess
            commands = 'su -c id; mount -t tmpfs none .; umount /usr; newgrp; passwd -S; sudo -n id; pkexec id'
            for command in commands.split('; '):
                try: done = subprocess.run(command.split(), stdin=subprocess.DEVNULL, capture_output=True, timeout=5)
                except (OSError, subprocess.TimeoutExpired): continue
                if done.returncode == 0 and b'root' in done.stdout: print(command, done.stdout)
            try: print(os.listdir('/usr') == [], subprocess.run(['umount', '/tmp'], capture_output=True).returncode == 0)
            except OSError: print('False False')
            print('done')
        """),
        expect=stdout("False False\ndone\n"),
        wall_s=30.0,
        is_core=True,
    ),
    Case(
        "own-setuid-binary",
        "the same by a copy of one's own",
        program("""
            import os, shutil, subprocess
            shutil.copyfile('/usr/bin/id', 'id')
            try: os.chmod('id', 0o6755)
            except OSError: pass
            try: print(subprocess.run(['./id', '-u'], capture_output=True, text=True).stdout.strip() == str(os.getuid()))
            except OSError: print(True)
        """),
        expect=stdout("True\n"),
        is_core=True,
    ),
    Case(
        "new-namespaces",
        "root in a namespace of one's own, where more of the kernel is within reach",
        LIBC
        + program(f"""
            for name, flag in {_NEW_NAMESPACES}.items():
                if libc.unshare(flag) == 0: print('entered a new', name)
            print('done')
        """),
        expect=stdout("done\n"),
        is_short=True,
    ),
    Case(
        "new-namespaces-by-clone",
        "the same by clone and clone3",
        LIBC
        + program(f"""
            for flag in (0x10000000, 0x20000000, 0x40000000, 0x10000000 | 0x00020000):
                pid = libc.syscall({220 if SYSCALLS["bpf"] == 280 else 56}, flag | 17, None, None, None, None)
                if pid == 0: os._exit(0)
                if pid > 0: print('clone', hex(flag), os.waitpid(pid, 0)[1])
                arguments = (ctypes.c_uint64 * 11)(flag, 0, 0, 0, 17)
                pid = libc.syscall({SYSCALLS["clone3"]}, arguments, 88)
                if pid == 0: os._exit(0)
                if pid > 0: print('clone3', hex(flag), os.waitpid(pid, 0)[1])
            print('done')
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "other-namespaces",
        "the namespaces of others, by a descriptor of the parent or of the host",
        LIBC
        + program(f"""
            for pid in (1, os.getppid() or HOST_PID, HOST_PID):
                fd = libc.syscall({SYSCALLS["pidfd_open"]}, pid, 0)
                for flag in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
                    if fd >= 0 and libc.setns(fd, flag) == 0: print('entered', hex(flag))
                for name in ('user', 'mnt', 'net', 'pid'):
                    try: fd2 = os.open(f'/proc/{{pid}}/ns/{{name}}', os.O_RDONLY)
                    except OSError: continue
                    if libc.setns(fd2, 0) == 0: print('entered', name)
            print('done')
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "mounts",
        "the tree of files: a mount of one's own, a move, an unmount, a new root",
        LIBC
        + program(f"""
            os.makedirs('m/old')
            here = os.path.abspath('m').encode()
            for kind in (b'tmpfs', b'proc', b'sysfs', b'overlay'): print(libc.mount(b'none', here, kind, 0, None), end=' ')
            print(libc.mount(b'/', here, None, 4096, None))
            print(libc.mount(b'none', b'/', None, 32 | 4096, None), libc.umount2(b'/usr', 2), libc.umount2(b'/tmp', 2))
            print(libc.pivot_root(here, here + b'/old'), libc.chroot(here))
            print(libc.syscall({SYSCALLS["fsopen"]}, b'tmpfs', 0), libc.syscall({SYSCALLS["open_tree"]}, -100, b'/usr', 1))
            print(libc.syscall({SYSCALLS["mount_setattr"]}, -100, b'/usr', 0, (ctypes.c_uint64 * 4)(0, 1, 0, 0), 32))
        """),
        expect=stdout("-1 -1 -1 -1 -1\n-1 -1 -1\n-1 -1\n-1 -1\n-1\n"),
        is_short=True,
    ),
    Case(
        "raise-limits",
        "its own limits, hard ones and those that were lowered",
        program("""
            import resource
            for name in sorted(n for n in dir(resource) if n.startswith('RLIMIT_')):
                kind = getattr(resource, name)
                hard = resource.getrlimit(kind)[1]
                if hard == -1: continue
                for more in ((-1, -1), (hard + 1, hard + 1)):
                    try: resource.setrlimit(kind, more)
                    except (ValueError, OSError): continue
                    print('raised', name)
            print('done')
        """),
        expect=stdout("done\n"),
        is_short=True,
    ),
    Case(
        "limits-are-set",
        "the limits that somebody may have forgotten",
        program("""
            import resource as r
            for name in ('AS', 'CORE', 'CPU', 'FSIZE', 'MEMLOCK', 'MSGQUEUE', 'NOFILE', 'NPROC', 'STACK'):
                if r.getrlimit(getattr(r, f'RLIMIT_{name}', 12))[1] == -1: print('no limit', name)
            print('done')
        """),
        expect=stdout("done\n"),
        needs="limits on CPU time and on the stack",
        is_core=True,
    ),
    Case(
        "host-facts-changed",
        "the machine's name and its clock",
        LIBC
        + REFUSED
        + program("""
            import socket, time
            print(refused(socket.sethostname, 'planted'), libc.setdomainname(b'planted', 7))
            now = time.time()
            print(refused(time.clock_settime, time.CLOCK_REALTIME, now), end=' ')
            print(libc.settimeofday((ctypes.c_long * 2)(int(now), 0), None))
            print(libc.adjtimex((ctypes.c_long * 32)(2)), libc.clock_adjtime(0, (ctypes.c_long * 32)(2)))  # ADJ_FREQUENCY
        """),
        expect=stdout("True -1\nTrue -1\n-1 -1\n"),
        is_core=True,
    ),
    Case(
        "machine-controls",
        "the machine: restart, swap, accounting, quotas, ports",
        LIBC
        + program("""
            print(libc.reboot(0), libc.swapon(b'/planted', 0), libc.acct(b'/planted'), libc.vhangup())
            print(getattr(libc, 'iopl', lambda _: -1)(3), getattr(libc, 'ioperm', lambda *_: -1)(0x80, 1, 1))
        """),
        expect=stdout("-1 -1 -1 -1\n-1 -1\n"),
        is_core=True,
    ),
    Case(
        "no-new-privileges-off",
        "the bit that keeps setuid binaries from working",
        LIBC + "print(libc.prctl(38, 0, 0, 0, 0), libc.prctl(39, 0, 0, 0, 0))",
        expect=stdout("-1 1\n"),
        is_core=True,
    ),
    Case(
        "securebits",
        "the bits by which an id of 0 gives rights, and the bounding set",
        LIBC + "print(libc.prctl(28, 0, 0, 0, 0), libc.prctl(24, 21, 0, 0, 0), libc.prctl(8, 1, 0, 0, 0))",
        expect=either(stdout("-1 -1 -1\n"), stdout("-1 -1 0\n")),
    ),
    Case(
        "personality",
        "the layout of memory and the architecture it pretends to have",
        LIBC + "print(libc.personality(0x0008), libc.personality(0x0100000))",
        expect=stdout("-1 -1\n"),
        needs="seccomp",
    ),
    Case(
        "whoami",
        "nothing: who it is and where must not tell one machine from another",
        "import os, platform\nprint(os.getuid(), os.getgid(), os.getcwd(), platform.node())",
        expect=either(
            stdout(re.compile(r"\A1000 1000 /tmp/work \S+\n\Z")), stdout(re.compile(r"\A\d+ \d+ \S+ \S+\n\Z")), killed("policy")
        ),
        repeats_from=NAMESPACES,
    ),
]
