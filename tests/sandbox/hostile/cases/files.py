"""Programs that want to read or change what is not theirs: the host's files, the libraries, and the ways out of their place."""

from __future__ import annotations

from ..case import Case, either, program, stdout
from .preludes import LIBC, NOT_AS_ROOT, REFUSED, SYSCALLS

CASES = [
    Case(
        "rm-rf",
        "every file there is",
        NOT_AS_ROOT + "import shutil\nshutil.rmtree('/', ignore_errors=True)\nprint('done')",
        wall_s=60.0,
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "host-files",
        "a file of the host that everybody may read, and the directory around it",
        REFUSED
        + program("""
            import os
            print(refused(open, HOST_SECRET_FILE), refused(os.listdir, HOST_OPEN_DIRECTORY), os.path.exists(HOST_SECRET_FILE))
        """),
        expect=either(stdout("True True False\n"), stdout("True True True\n")),
        is_core=True,
    ),
    Case(
        "host-files-written",
        "the same by changing, moving, replacing and deleting it",
        REFUSED
        + program("""
            import os
            for attack in (
                lambda: open(HOST_SECRET_FILE, 'a'),
                lambda: open(HOST_OPEN_DIRECTORY + '/planted', 'w'),
                lambda: os.unlink(HOST_SECRET_FILE),
                lambda: os.rename(HOST_SECRET_FILE, 'mine'),
                lambda: os.truncate(HOST_SECRET_FILE, 0),
                lambda: os.chmod(HOST_SECRET_FILE, 0),
                lambda: os.utime(HOST_SECRET_FILE),
                lambda: os.mkdir(HOST_OPEN_DIRECTORY + '/planted'),
                lambda: os.symlink('/', HOST_OPEN_DIRECTORY + '/planted'),
                lambda: os.setxattr(HOST_SECRET_FILE, 'user.planted', b'x'),
            ): print(refused(attack), end=' ')
        """),
        expect=stdout("True " * 10),
        needs="a mount namespace, or Landlock and another user",
        is_short=True,
    ),
    Case(
        "host-files-linked",
        "the same by a link from one's own place",
        REFUSED
        + program("""
            import os
            print(refused(os.link, HOST_SECRET_FILE, 'hard'))
            os.symlink(HOST_SECRET_FILE, 'soft')
            print(refused(open, 'soft'), refused(open, 'soft', 'a'), refused(os.truncate, 'soft', 0))
        """),
        expect=stdout("True\nTrue True True\n"),
        is_core=True,
    ),
    Case(
        "system-files",
        "the users of the host, their keys and their shells' histories",
        program("""
            import glob, os, sys
            private = '/etc/passwd /etc/shadow /etc/hosts /root/.* /home/* /var/log/* /boot/* /srv/* /mnt/* /media/*'
            for pattern in private.split():
                for path in glob.glob(pattern):
                    if sys.base_prefix.startswith(path): continue  # where the interpreter is, for everybody to read
                    try: open(path).read() if os.path.isfile(path) else os.listdir(path)
                    except OSError: continue
                    print('read', path)
            print('done')
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "own-source",
        "the sources of the service, of its tests and of their repository",
        program("""
            import importlib.util, os, sys
            print(importlib.util.find_spec('strop'))
            for path in sys.path:
                for name in ('strop', 'tests', '.git', 'pyproject.toml'):
                    if os.path.exists(os.path.join(path, name)): print('found', name)
        """),
        expect=stdout("None\n"),
        needs="a root that does not show the service's own package",
    ),
    Case(
        "dot-dot",
        "the walls of its place, by going up",
        REFUSED
        + program("""
            up = '/tmp/' + '../' * 50
            for path in 'etc/passwd etc/hostname proc/version boot/. root/.profile'.split(): print(refused(open, up + path))
        """),
        expect=stdout("True\n" * 5),
    ),
    Case(
        "proc-root",
        "the same by the kernel's own links to other roots",
        REFUSED
        + program("""
            import os
            names = ['root/etc/passwd', 'environ', 'mem', 'maps', 'cmdline', 'task', 'stack', 'syscall']
            for pid in ('self', 'thread-self', '1', str(os.getppid()), str(HOST_PID)):
                for name in names if 'self' in pid else [*names, 'cwd/.', 'fd/0', 'exe', 'ns/mnt', 'net/tcp', 'fdinfo/0']:
                    path = f'/proc/{pid}/{name}'
                    if not refused(os.stat, path) and not refused(os.open, path, os.O_RDONLY): print('opened', path)
            print('done')
        """),
        expect=stdout("done\n"),
        is_short=True,
    ),
    Case(
        "chroot-escape",
        "the same by a second root below the first, left through an open directory",
        LIBC
        + program("""
            os.mkdir('jail')
            print(libc.chroot(b'jail'))
            try: os.fchdir(os.open('/', os.O_RDONLY | os.O_DIRECTORY))
            except OSError: pass
            print(libc.chroot(b'../../..'))
        """),
        expect=stdout("-1\n-1\n"),
        is_core=True,
    ),
    Case(
        "directory-descriptor",
        "the same through a directory that someone left open",
        program("""
            import os
            for fd in range(3, 1024):
                try:
                    os.fchdir(fd)
                    print('entered', fd, os.listdir('.'))
                except OSError: pass
            print('done')
        """),
        expect=stdout("done\n"),
    ),
    Case(
        "file-handles",
        "the same by the number of a file rather than its name",
        LIBC
        + program(f"""
            handle = ctypes.create_string_buffer(136)
            handle[0:4] = (128).to_bytes(4, 'little')
            mount = ctypes.c_int()
            print(libc.syscall({SYSCALLS["name_to_handle_at"]}, -100, b'/usr', handle, ctypes.byref(mount), 0))
            print(libc.open_by_handle_at(os.open('/usr', 0), handle, 0))
        """),
        expect=stdout("-1\n-1\n"),
        needs="seccomp",
    ),
    Case(
        "overwrite-libraries",
        "the code that the next call runs",
        REFUSED
        + program("""
            import json, os, site, sys
            places = [os.path.dirname(os.__file__), *[path for path in sys.path if path]]
            for place in places:
                for name in ('os.py', 'usercustomize.py', 'planted.pth', '__pycache__/os.cpython-311.pyc', 'json/__init__.py'):
                    if not refused(open, os.path.join(place, name), 'a'): print('opened', name)
            print(refused(open, sys.executable, 'r+b'), refused(os.unlink, json.__file__))
            print(refused(os.chmod, os.__file__, 0o777))
        """),
        expect=stdout("True True\nTrue\n"),
        is_short=True,
    ),
    Case(
        "overwrite-running-binary",
        "the same through the map of a running program",
        REFUSED + "import sys, ctypes\nprint(refused(open, '/proc/self/exe', 'r+b'), refused(open, '/proc/self/mem', 'r+b'))",
        expect=stdout("True True\n"),
    ),
    Case(
        "plant-in-root",
        "places from which something is run or read at the next start",
        REFUSED
        + program("""
            import os
            paths = '''
                /planted /usr/planted /usr/bin/planted /etc/planted /etc/ld.so.preload /lib/planted
                /dev/planted /proc/planted /sys/planted /run/planted /var/tmp/planted /home/planted
                /root/planted /new/planted /old/planted /moved/planted
            '''
            for path in paths.split():
                if not refused(os.open, path, os.O_CREAT | os.O_WRONLY): print('made', path)
            print('done')
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "rename-mount-point",
        "the directories that the sandbox is made of: moved, exchanged, deleted",
        LIBC
        + program("""
            for path in (b'/tmp', b'/dev', b'/dev/shm', b'/usr', b'/proc'):
                print(libc.rename(path, b'/moved-away'), libc.rmdir(path), end=' ')
                print(libc.renameat2(-100, path, -100, b'/bin', 2), end=' ')
        """),
        expect=stdout("-1 -1 -1 " * 5),
        is_core=True,
    ),
    Case(
        "devices",
        "the machine's devices",
        program("""
            import glob
            harmless = {'/dev/null', '/dev/zero', '/dev/full', '/dev/random', '/dev/urandom', '/dev/tty', '/dev/shm'}
            names = 'mem kmem port kvm fuse loop0 loop-control sda vda nvme0n1 nvidia0 nvidiactl dri/card0 kfd vhost-net vsock'
            names += ' net/tun uinput hpet rtc0 mapper/control kmsg console tty0 ptmx snapshot userfaultfd'
            names += ' cpu/0/msr mcelog watchdog sg0 btrfs-control vfio/vfio'
            for path in {*glob.glob('/dev/*'), *('/dev/' + name for name in names.split())} - harmless:
                for mode in ('rb', 'r+b'):
                    try: open(path, mode).close()
                    except OSError: continue
                    print('opened', path)
            print('done')
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "make-device",
        "the same by a device of one's own making",
        REFUSED
        + program("""
            import os, stat
            print(refused(os.mknod, 'mem', 0o666 | stat.S_IFCHR, os.makedev(1, 1)))
            print(refused(os.mknod, 'disk', 0o666 | stat.S_IFBLK, os.makedev(7, 0)))
        """),
        expect=stdout("True\nTrue\n"),
        is_core=True,
    ),
    Case(
        "write-to-devices",
        "the devices that everybody has: what is written into the pool of randomness, and its controls",
        REFUSED
        + program("""
            import fcntl, struct
            pool = open('/dev/urandom')
            print(refused(fcntl.ioctl, pool, 0x40085203, struct.pack('ii8s', 64, 8, b'planted!')))  # RNDADDENTROPY
        """),
        expect=stdout("True\n"),
    ),
    Case(
        "sysctl",
        "the settings of the kernel: what runs at a crash, what is logged, how memory is given out",
        REFUSED
        + program("""
            paths = '''
                /proc/sys/kernel/core_pattern /proc/sys/kernel/modprobe /proc/sys/vm/overcommit_memory
                /proc/sysrq-trigger /proc/sys/kernel/hostname /proc/sys/user/max_user_namespaces
                /sys/kernel/uevent_helper /sys/power/state /sys/fs/cgroup/cgroup.procs
                /sys/fs/cgroup/release_agent /sys/kernel/debug /sys/module
            '''
            for path in paths.split():
                if not refused(open, path, 'w'): print('opened', path)
            print('done')
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "facts-of-the-host",
        "what the machine tells about itself and its other programs",
        REFUSED
        + program("""
            paths = '''
                /proc/cmdline /proc/version /proc/mounts /proc/self/mountinfo /proc/net/tcp /proc/net/unix
                /proc/keys /proc/modules /proc/kallsyms /proc/sysvipc/shm /proc/timer_list /proc/self/cgroup
                /sys/class/net /sys/block /etc/machine-id /etc/resolv.conf /var/run/docker.sock /run/systemd
            '''
            for path in paths.split():
                if not refused(open, path): print('opened', path)
            print('done')
        """),
        expect=stdout("done\n"),
        is_core=True,
    ),
    Case(
        "left-for-the-next",
        "the next call, by files where it might look",
        before=(
            "for path in ('left', '/tmp/left', '/dev/shm/left', '/var/tmp/left', '/tmp/work/left', '/tmp/shm/left'):\n"
            "    try: open(path, 'w').write('left')\n    except OSError: pass",
        ),
        code=program("""
            import os
            places = ('left', '/tmp/left', '/dev/shm/left', '/var/tmp/left', '/tmp/work/left')
            print(*(p for p in places if os.path.exists(p)), os.listdir('.'))
        """),
        expect=stdout("[]\n"),
        is_short=True,
    ),
    Case(
        "shared-memory-left",
        "the same by the named memory that multiprocessing uses",
        before=(
            program("""
            from multiprocessing import shared_memory, resource_tracker
            resource_tracker.register = lambda *_: None
            m = shared_memory.SharedMemory('left', create=True, size=4096)
            m.buf[:4] = b'left'
        """),
        ),
        code=program("""
            from multiprocessing import shared_memory
            import os
            try: print(bytes(shared_memory.SharedMemory('left').buf[:4]))
            except OSError: print('refused')
        """),
        expect=stdout("refused\n"),
        is_core=True,
    ),
    Case(
        "modules-in-cwd",
        "the next call, by modules that shadow a library",
        before=(
            "for name in ('numpy', 'json', 'usercustomize', 'sitecustomize', 'strop'):\n"
            "    open(f'{name}.py', 'w').write('print(\"planted\")')",
        ),
        code="import json, numpy\nprint(json.dumps(1), numpy.array(2))",
        expect=stdout("1 2\n"),
    ),
    Case(
        "shared-file-locks",
        "other calls, by locks on files that all of them see",
        program("""
            import fcntl, os, time
            f = open(os.__file__)
            try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except PermissionError: print('refused')
            time.sleep(0.3)
        """),
        alongside=program("""
            import fcntl, os, time
            time.sleep(0.1)
            f = open(os.__file__)
            try: fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError: print('seen')
        """),
        expect=stdout("refused\n"),
    ),
    Case(
        "watch-others",
        "other calls, by watching which files they open",
        LIBC
        + program("""
            import time
            watch = libc.inotify_init1(0o4000)
            for place in ('/tmp', '/', os.path.dirname(HOST_SECRET_FILE)): libc.inotify_add_watch(watch, place.encode(), 0xFFF)
            time.sleep(0.2)
            try: print(os.read(watch, 4096))
            except OSError: print('nothing')
        """),
        alongside=program("""
            import time
            for n in range(10):
                open('/tmp/x', 'w').close()
                time.sleep(0.02)
        """),
        expect=stdout("nothing\n"),
        is_core=True,
    ),
]
