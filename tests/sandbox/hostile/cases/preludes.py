"""First lines that several programs share."""

from __future__ import annotations

import platform

from ..case import program

LIBC = program("""
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
""")

# What an unconfined process of the same user may do must be refused with an exception here.
REFUSED = program("""
    def refused(action, *arguments):
        try: action(*arguments)
        except (OSError, ValueError, AttributeError): return True
        return False
""")

# Where the confinement is broken, these programs would break the machine that runs the tests.
NOT_AS_ROOT = program("""
    import os
    if os.getuid() == 0: raise SystemExit('this program has to be run by somebody else')
""")

# A survivor carries the mark, so that it is found from outside wherever it hides.
SURVIVE = LIBC + program("""
    import time
    def leave():
        try: os.setsid()
        except OSError: pass
    def survive(seconds=60):
        libc.prctl(15, HOST_MARK.encode(), 0, 0, 0)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline: time.sleep(1)
        os._exit(0)
""")

IGNORE_ALL_SIGNALS = program("""
    import signal
    for number in range(1, 65):
        try: signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError): pass
""")

IS_X86 = platform.machine() == "x86_64"
SYSCALLS = {  # of the calls that glibc has no function for, on x86_64
    "add_key": 248,
    "bpf": 321,
    "kcmp": 312,
    "keyctl": 250,
    "modify_ldt": 154,
    "name_to_handle_at": 303,
    "perf_event_open": 298,
    "request_key": 249,
    "userfaultfd": 323,
    "sched_setattr": 314,
    "kexec_load": 246,
    "init_module": 175,
    "ioprio_set": 251,
    "syslog": 103,
    "tgkill": 234,
    "rt_sigqueueinfo": 129,
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "open_tree": 428,
    "fsopen": 430,
    "pidfd_open": 434,
    "clone3": 435,
    "pidfd_getfd": 438,
    "mount_setattr": 442,
    "memfd_secret": 447,
}
