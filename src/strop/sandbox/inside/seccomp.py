"""What a program may not ask of the kernel, as a filter that it cannot take off and that its children inherit.

A list of refusals rather than of permissions: a library that asks for something new gets an errno and falls back, and each
refusal reads as a clear Python exception. What the kernel gained after this list was written does not exist for a program.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import platform
import struct
from dataclasses import dataclass

from . import kernel, syscalls
from .bpf import ALLOW, KILL, NOTIFY, Rule, Test, assemble, fail

_REFUSED = fail(errno.EPERM)
_UNREACHABLE = fail(errno.EACCES)  # a PermissionError too, but one that says network rather than privilege: see connect(2)
_ABSENT = fail(errno.ENOSYS)

_SET_MODE_FILTER, _NEW_LISTENER = 1, 8
_AF_UNIX, _SOCK_STREAM, _SOCK_SEQPACKET, _SOCK_TYPE_MASK = 1, 1, 5, 0xF
_SOL_SOCKET, _SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE = 1, 7, 8, 32, 33
_PRIO_PROCESS, _IOPRIO_WHO_PROCESS = 0, 1
_RLIMIT_NPROC = 6
_PERSONALITY_QUERY = 0xFFFFFFFF
_CLONE_NEW = 0x7E020000  # every namespace that clone can ask for
_CLONE_PARENT = 0x00008000  # would give the fork server a child that it does not know
_F_SETOWN, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 15, 1024, 1026

_REFUSED_CALLS = {
    "other processes": "ptrace process_vm_readv process_vm_writev process_madvise process_mrelease pidfd_getfd kcmp "
    "migrate_pages move_pages",
    "mounts": "umount2 open_tree open_tree_attr move_mount fsopen fsconfig fsmount fspick mount_setattr pivot_root chroot "
    "statmount listmount",
    "namespaces": "setns",
    "a large attack surface": "bpf perf_event_open userfaultfd io_uring_setup io_uring_enter io_uring_register vmsplice "
    "lookup_dcookie nfsservctl uselib seccomp",
    "keys": "add_key request_key keyctl",
    "what outlives a call": "shmget shmat shmctl shmdt semget semop semctl semtimedop msgget msgsnd msgrcv msgctl mq_open "
    "mq_unlink mq_timedsend mq_timedreceive mq_notify mq_getsetattr",
    "memory that no limit counts": "memfd_create memfd_secret",
    "the machine": "create_module init_module delete_module finit_module kexec_load kexec_file_load reboot swapon swapoff acct "
    "quotactl quotactl_fd settimeofday clock_settime adjtimex clock_adjtime sethostname setdomainname syslog vhangup",
    "files past their paths": "open_by_handle_at name_to_handle_at fanotify_init fanotify_mark",
    "processor modes": "modify_ldt ioperm iopl",
}
# Landlock does not judge these, and without a mount namespace the host's files are there: whoever owns a file may change the
# first, whoever may write to it the others.
_ATTRIBUTES_OF_OWN = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat file_setattr"
_ATTRIBUTES_OF_WRITABLE = (
    "setxattr lsetxattr fsetxattr setxattrat removexattr lremovexattr fremovexattr removexattrat "
    "utime utimes futimesat utimensat"
)
# The system's files are the same for all calls: who opens or locks one could tell that to another, or hold up the host.
_MAILBOXES = "flock inotify_init inotify_init1 inotify_add_watch"
_SIGNALS = "tkill tgkill rt_sigqueueinfo rt_tgsigqueueinfo pidfd_send_signal"


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


class Filter:
    """A filter as the kernel takes it, laid out once so that a child only passes a pointer."""

    def __init__(self, code: bytes, *, has_listener: bool = False) -> None:
        self.code = code
        self.num_instructions = len(code) // 8
        self.has_listener = has_listener
        self._memory = ctypes.create_string_buffer(code, len(code))
        self._program = _Program(length=self.num_instructions, instructions=ctypes.addressof(self._memory))
        self.pointer = ctypes.byref(self._program)


def build(
    *,
    is_namespaced: bool,
    in_session: bool = False,
    has_own_uid: bool = False,
    are_signals_scoped: bool = False,
    machine: str = platform.machine(),
) -> Filter:
    """The filter for a program; built once, before the forks.

    Args:
        is_namespaced: it has pid and mount namespaces of its own. Without them the filter also holds it in its process group,
            so that one kill of the group reaches every descendant, keeps it from the attributes of files, and from signals
            unless one of the two below says that they are harmless.
        in_session: asking for a namespace or a mount waits for the supervisor's answer, through the listener of `install`; and
            the limit of processes stays as it is, since what a copy may start is bounded by what its origin might have.
        has_own_uid: nothing else on the machine runs as its uid or owns files by it: it may change whose its own files are.
        are_signals_scoped: Landlock keeps its signals inside (ABI 6). Where nothing does, a program can signal only itself
            together with all its kin (`kill(0, ...)`): it cannot end one of its children.

    Raises:
        OSError: no table of system calls for this architecture.
    """
    rules = _always(privileged=NOTIFY if in_session else _REFUSED) | _each(_MAILBOXES, _REFUSED)
    if in_session:
        rules |= _fixed_limit(_RLIMIT_NPROC)
    if not is_namespaced:
        rules |= _each("setsid setpgid", _REFUSED)
        rules |= _each(_ATTRIBUTES_OF_WRITABLE, _REFUSED)
        if not has_own_uid:
            rules |= _each(_ATTRIBUTES_OF_OWN, _REFUSED)
            if not are_signals_scoped:
                rules |= _each(_SIGNALS, _REFUSED) | {"kill": _only(0, 0)}
    numbers = syscalls.numbers(machine)
    if unknown := rules.keys() - syscalls.NAMES:
        raise AssertionError(f"no table of system calls has {', '.join(sorted(unknown))}")
    code = assemble(
        {numbers[name]: rule for name, rule in rules.items() if name in numbers},
        architecture=syscalls.architecture(machine),
        ends={syscalls.FIRST_UNKNOWN: _ABSENT, syscalls.FOREIGN: KILL},
    )
    return Filter(code, has_listener=in_session)


def install(program: Filter) -> int:
    """Put the calling thread under it for good. Returns the listener of a session's filter, close-on-exec, or -1.

    The listener belongs in the supervisor alone: whoever can reach it answers the questions.
    """
    kernel.check(kernel.libc.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    flags = _NEW_LISTENER if program.has_listener else 0
    number = syscalls.numbers()["seccomp"]
    result = kernel.check(kernel.libc.syscall(number, _SET_MODE_FILTER, flags, program.pointer), "install a seccomp filter")
    return result if program.has_listener else -1


def _always(*, privileged: Rule) -> dict[str, Rule]:
    """What holds at every level; `privileged` is the answer to a request for namespaces or mounts."""
    rules: dict[str, Rule] = {}
    for names in _REFUSED_CALLS.values():
        rules |= _each(names, _REFUSED)
    rules |= _each("unshare mount", privileged)
    rules |= _each("bind connect listen accept accept4", _UNREACHABLE)
    rules |= _each("sched_setparam sched_setscheduler sched_setaffinity sched_setattr prlimit64", _only(0, 0))
    for command in (_F_SETOWN, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY):  # signals to others; a file that others wait for
        rules["fcntl"] = Test(argument=1, equals=command, then=_REFUSED, otherwise=rules.get("fcntl", ALLOW))
    for option in (_SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE):  # memory of the kernel that no limit counts
        of_socket = Test(argument=1, equals=_SOL_SOCKET, then=_REFUSED, otherwise=ALLOW)
        rules["setsockopt"] = Test(argument=2, equals=option, then=of_socket, otherwise=rules.get("setsockopt", ALLOW))
    unix = Test(
        argument=1,
        mask=_SOCK_TYPE_MASK,
        equals=_SOCK_STREAM,
        then=ALLOW,
        # Never datagrams: sendmsg takes an address that no filter sees, such as a service's socket on the host.
        otherwise=Test(argument=1, mask=_SOCK_TYPE_MASK, equals=_SOCK_SEQPACKET, then=ALLOW, otherwise=_UNREACHABLE),
    )
    rules |= _each("socket socketpair", Test(argument=0, equals=_AF_UNIX, then=unix, otherwise=_UNREACHABLE))
    no_namespace = Test(argument=0, mask=_CLONE_NEW, equals=0, then=ALLOW, otherwise=privileged)
    return rules | {
        "clone": Test(argument=0, mask=_CLONE_PARENT, equals=0, then=no_namespace, otherwise=_REFUSED),
        "clone3": _ABSENT,  # its flags are in memory, which no filter sees; libc then takes clone
        "setpriority": _only(0, _PRIO_PROCESS, then=_only(1, 0)),
        "ioprio_set": _only(0, _IOPRIO_WHO_PROCESS, then=_only(1, 0)),
        "personality": _only(0, _PERSONALITY_QUERY),
    }


def _fixed_limit(kind: int) -> dict[str, Rule]:
    """Nobody sets this limit, of others or its own; it may still be read."""
    is_query = Test(
        argument=2,
        equals=0,
        then=Test(argument=2, is_high_half=True, equals=0, then=ALLOW, otherwise=_REFUSED),
        otherwise=_REFUSED,
    )
    return {
        "setrlimit": Test(argument=0, equals=kind, then=_REFUSED, otherwise=ALLOW),
        "prlimit64": _only(0, 0, then=Test(argument=1, equals=kind, then=is_query, otherwise=ALLOW)),
    }


def _each(names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


def _only(argument: int, value: int, *, then: Rule = ALLOW) -> Rule:
    """Refused unless `argument` is `value`: of a pid, 0 is the caller."""
    return Test(argument=argument, equals=value, then=then, otherwise=_REFUSED)


# What follows is the supervisor's side of a session's filter.

_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif: id, pid, flags, number, architecture, address, arguments
_ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A system call that waits for an answer. Arguments that are addresses must not be trusted: their content may change."""

    id: int
    pid: int  # of the thread, as the receiver's pid namespace numbers it; 0 if it is not in there
    name: str
    arguments: tuple[int, ...]


def receive(listener: int) -> Notification | None:
    """The next question; waits for one, so poll first. None when whoever asked is gone.

    Raises:
        OSError: nobody is left who could ask.
    """
    content = bytearray(_NOTIFICATION.size)
    try:
        fcntl.ioctl(listener, _RECEIVE, content)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
    ticket, pid, _, number, _, _, *arguments = _NOTIFICATION.unpack(content)
    return Notification(id=ticket, pid=pid, name=_name(number), arguments=tuple(arguments))


def allow(listener: int, ticket: int) -> bool:
    """Let the call happen as it was asked. False when whoever asked is gone, or has its answer."""
    return _answer(listener, _ANSWER.pack(ticket, 0, 0, _CONTINUE))


def refuse(listener: int, ticket: int, error: int = errno.EPERM) -> bool:
    """Let the call fail with `error`. False when whoever asked is gone, or has its answer."""
    return _answer(listener, _ANSWER.pack(ticket, 0, -error, 0))


def _answer(listener: int, answer: bytes) -> bool:
    try:
        fcntl.ioctl(listener, _SEND, answer)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.EINPROGRESS):
            return False
        raise
    return True


def _name(number: int) -> str:
    return next((name for name, known in syscalls.numbers().items() if known == number), str(number))
