"""The numbers of the system calls that a filter speaks of, on each architecture it can be built for."""

from __future__ import annotations

import errno
import platform

FIRST_UNKNOWN = 470  # Linux 6.18 ends at 469; what comes later nobody has judged yet
FOREIGN = 0x40000000  # from here on, the x32 ABI of x86_64

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*; both little-endian

_SAME = {  # since Linux 5.1 a new call has one number everywhere
    "pidfd_send_signal": 424, "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428,
    "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "clone3": 435, "pidfd_getfd": 438,
    "process_madvise": 440, "mount_setattr": 442, "quotactl_fd": 443, "landlock_create_ruleset": 444, "landlock_add_rule": 445,
    "landlock_restrict_self": 446, "memfd_secret": 447, "process_mrelease": 448, "fchmodat2": 452, "statmount": 457,
    "listmount": 458, "setxattrat": 463, "removexattrat": 466, "open_tree_attr": 467, "file_setattr": 469,
}  # fmt: skip

_X86_64 = {
    "accept": 43, "accept4": 288, "acct": 163, "add_key": 248, "adjtimex": 159, "bind": 49, "bpf": 321, "chmod": 90,
    "chown": 92, "chroot": 161, "clock_adjtime": 305, "clock_settime": 227, "clone": 56, "connect": 42, "create_module": 174,
    "delete_module": 176, "fanotify_init": 300, "fanotify_mark": 301, "fchmod": 91, "fchmodat": 268, "fchown": 93,
    "fchownat": 260, "fcntl": 72, "finit_module": 313, "fremovexattr": 199, "fsetxattr": 190, "futimesat": 261,
    "flock": 73,
    "init_module": 175, "inotify_add_watch": 254, "inotify_init": 253, "inotify_init1": 294, "ioperm": 173, "iopl": 172,
    "ioprio_set": 251, "kcmp": 312, "kexec_file_load": 320, "kexec_load": 246, "keyctl": 250, "kill": 62, "lchown": 94,
    "listen": 50, "lookup_dcookie": 212, "lremovexattr": 198, "lsetxattr": 189, "memfd_create": 319, "migrate_pages": 256,
    "modify_ldt": 154, "mount": 165, "move_pages": 279, "mq_getsetattr": 245, "mq_notify": 244, "mq_open": 240,
    "mq_timedreceive": 243, "mq_timedsend": 242, "mq_unlink": 241, "msgctl": 71, "msgget": 68, "msgrcv": 70, "msgsnd": 69,
    "name_to_handle_at": 303, "nfsservctl": 180, "open_by_handle_at": 304, "perf_event_open": 298, "personality": 135,
    "pivot_root": 155, "prlimit64": 302, "process_vm_readv": 310, "process_vm_writev": 311, "ptrace": 101, "quotactl": 179,
    "reboot": 169, "removexattr": 197, "request_key": 249, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
    "sched_setaffinity": 203, "sched_setattr": 314, "sched_setparam": 142, "sched_setscheduler": 144, "seccomp": 317,
    "semctl": 66, "semget": 64, "semop": 65, "semtimedop": 220, "setdomainname": 171, "sethostname": 170, "setns": 308,
    "setpgid": 109, "setpriority": 141, "setrlimit": 160, "setsid": 112, "setsockopt": 54, "settimeofday": 164,
    "setxattr": 188, "shmat": 30,
    "shmctl": 31, "shmdt": 67, "shmget": 29, "socket": 41, "socketpair": 53, "swapoff": 168, "swapon": 167, "syslog": 103,
    "tgkill": 234,
    "tkill": 200, "umount2": 166, "unshare": 272, "uselib": 134, "userfaultfd": 323, "utime": 132, "utimensat": 280,
    "utimes": 235, "vhangup": 153, "vmsplice": 278,
}  # fmt: skip

_AARCH64 = {  # it never had the calls that are missing here
    "accept": 202, "accept4": 242, "acct": 89, "add_key": 217, "adjtimex": 171, "bind": 200, "bpf": 280, "chroot": 51,
    "clock_adjtime": 266, "clock_settime": 112, "clone": 220, "connect": 203, "delete_module": 106, "fanotify_init": 262,
    "fanotify_mark": 263, "fchmod": 52, "fchmodat": 53, "fchown": 55, "fchownat": 54, "fcntl": 25, "finit_module": 273,
    "flock": 32, "fremovexattr": 16, "fsetxattr": 7, "init_module": 105, "inotify_add_watch": 27, "inotify_init1": 26,
    "ioprio_set": 30,
    "kcmp": 272, "kexec_file_load": 294, "kexec_load": 104, "keyctl": 219, "kill": 129, "listen": 201, "lookup_dcookie": 18,
    "lremovexattr": 15, "lsetxattr": 6, "memfd_create": 279, "migrate_pages": 238, "mount": 40, "move_pages": 239,
    "mq_getsetattr": 185, "mq_notify": 184, "mq_open": 180, "mq_timedreceive": 183, "mq_timedsend": 182, "mq_unlink": 181,
    "msgctl": 187, "msgget": 186, "msgrcv": 188, "msgsnd": 189, "name_to_handle_at": 264, "nfsservctl": 42,
    "open_by_handle_at": 265, "perf_event_open": 241, "personality": 92, "pivot_root": 41, "prlimit64": 261,
    "process_vm_readv": 270, "process_vm_writev": 271, "ptrace": 117, "quotactl": 60, "reboot": 142, "removexattr": 14,
    "request_key": 218, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240, "sched_setaffinity": 122, "sched_setattr": 274,
    "sched_setparam": 118, "sched_setscheduler": 119, "seccomp": 277, "semctl": 191, "semget": 190, "semop": 193,
    "semtimedop": 192, "setdomainname": 162, "sethostname": 161, "setns": 268, "setpgid": 154, "setpriority": 140,
    "setrlimit": 164, "setsid": 157, "setsockopt": 208, "settimeofday": 170, "setxattr": 5, "shmat": 196,
    "shmctl": 195, "shmdt": 197,
    "shmget": 194, "socket": 198, "socketpair": 199, "swapoff": 225, "swapon": 224, "syslog": 116, "tgkill": 131, "tkill": 130,
    "umount2": 39, "unshare": 97, "userfaultfd": 282, "utimensat": 88, "vhangup": 58, "vmsplice": 75,
}  # fmt: skip

_NUMBERS = {"x86_64": _X86_64 | _SAME, "aarch64": _AARCH64 | _SAME}
NAMES = frozenset().union(*_NUMBERS.values())  # a call that is missing from every table would be refused nowhere


def numbers(machine: str = platform.machine()) -> dict[str, int]:
    """Name -> number of the calls that `machine` has.

    Raises:
        OSError: no table for this architecture.
    """
    _require(machine)
    return _NUMBERS[machine]


def architecture(machine: str = platform.machine()) -> int:
    """What the kernel calls `machine` in a filter. Raises `OSError` as `numbers` does."""
    _require(machine)
    return _ARCHITECTURES[machine]


def _require(machine: str) -> None:
    if machine not in _NUMBERS:
        raise OSError(errno.ENOSYS, f"no table of system calls for {machine}; there are those of {' and '.join(_NUMBERS)}")
