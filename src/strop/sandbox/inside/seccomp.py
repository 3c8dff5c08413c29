"""Builds and installs the seccomp filter: what a program may not ask of the kernel. Its children inherit the filter.

The filter lists what is refused, not what is permitted: a library that tries something new gets an errno and falls back, and
each refusal reads as a clear Python exception. Calls that the kernel gained after this list was written do not exist for a
program.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from . import kernel

# The assembler: classic BPF.

ALLOW, KILL, NOTIFY = 0x7FFF0000, 0x80000000, 0x7FC00000
_ERRNO = 0x00050000

_AUDIT_ARCH = 0xC000003E
_FOREIGN = 0x40000000  # from here on: the x32 ABI
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06  # of an absolute word; by a constant; a constant
_JUMP_IF_EQUAL, _JUMP_IF_NOT_BELOW = 0x15, 0x35
_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data
_INSTRUCTION = struct.Struct("<HBBI")
_MAX_JUMP = 255

_Instruction = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Test:
    """Decides by the low 32 bits of one argument: the kernel reads no more of pids, flags, commands and families."""

    argument: int
    equals: int
    mask: int = 0xFFFFFFFF
    is_high_half: bool = False
    then: Rule
    otherwise: Rule


Rule = int | Test  # an action of the kernel, or a test that leads to one


def fail(code: int) -> int:
    """Return the action: the call does nothing and fails with `code`."""
    return _ERRNO | code


def assemble(rules: Mapping[int, Rule], *, ends: Mapping[int, Rule]) -> bytes:
    """Return a filter that applies the rule of each number, and allows the other calls. It searches the numbers in halves.

    A call of any other ABI kills the process.

    The kernel runs a filter for every number when it is installed, to learn which calls are always allowed (those then cost
    nothing): a list of a hundred numbers takes 260 us to install, a search 80 us.

    Args:
        ends: rules for all numbers from a key up to the next one.
    """
    starts: dict[int, Rule] = {0: ALLOW}
    for number in sorted(rules):
        starts[number] = rules[number]
        starts.setdefault(number + 1, ALLOW)
    starts.update(ends)
    merged: list[tuple[int, Rule]] = []
    for start in sorted(starts):
        if not merged or merged[-1][1] != starts[start]:
            merged.append((start, starts[start]))
    program = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_IF_EQUAL, 1, 0, _AUDIT_ARCH),
        (_RETURN, 0, 0, KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        *_search(merged),
    ]
    return b"".join(_INSTRUCTION.pack(*instruction) for instruction in program)


def _search(ranges: list[tuple[int, Rule]]) -> list[_Instruction]:
    """Search (first number, rule), ascending; a number belongs to the last range that starts at or below it."""
    if len(ranges) == 1:
        return _decide(ranges[0][1])
    middle = len(ranges) // 2
    low, high = _search(ranges[:middle]), _search(ranges[middle:])
    return [_branch(_JUMP_IF_NOT_BELOW, ranges[middle][0], when_true=len(low), when_false=0), *low, *high]


def _decide(rule: Rule) -> list[_Instruction]:
    if isinstance(rule, int):
        return [(_RETURN, 0, 0, rule)]
    then, otherwise = _decide(rule.then), _decide(rule.otherwise)
    program: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + 8 * rule.argument + 4 * rule.is_high_half)]
    if rule.mask != 0xFFFFFFFF:
        program.append((_AND, 0, 0, rule.mask))
    return [*program, _branch(_JUMP_IF_EQUAL, rule.equals, when_true=0, when_false=len(then)), *then, *otherwise]


def _branch(kind: int, value: int, *, when_true: int, when_false: int) -> _Instruction:
    if max(when_true, when_false) > _MAX_JUMP:
        raise ValueError(f"a filter with a jump over {max(when_true, when_false)} instructions; BPF allows {_MAX_JUMP}")
    return kind, when_true, when_false, value


# The rules.

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
_CLONE_PARENT = 0x00008000  # would give the fork server an unknown child
_F_SETOWN, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY = 8, 15, 1024, 1026

_REFUSED_CALLS = {  # with their numbers on x86_64
    "other processes": "ptrace 101 process_vm_readv 310 process_vm_writev 311 process_madvise 440 process_mrelease 448 "
    "pidfd_getfd 438 kcmp 312 migrate_pages 256 move_pages 279",
    "mounts": "umount2 166 open_tree 428 open_tree_attr 467 move_mount 429 fsopen 430 fsconfig 431 fsmount 432 fspick 433 "
    "mount_setattr 442 pivot_root 155 chroot 161 statmount 457 listmount 458",
    "namespaces": "setns 308",
    "a large attack surface": "bpf 321 perf_event_open 298 userfaultfd 323 io_uring_setup 425 io_uring_enter 426 "
    "io_uring_register 427 vmsplice 278 lookup_dcookie 212 nfsservctl 180 uselib 134 seccomp 317",
    "keys": "add_key 248 request_key 249 keyctl 250",
    "what outlives a call": "shmget 29 shmat 30 shmctl 31 shmdt 67 semget 64 semop 65 semctl 66 semtimedop 220 msgget 68 "
    "msgsnd 69 msgrcv 70 msgctl 71 mq_open 240 mq_unlink 241 mq_timedsend 242 mq_timedreceive 243 mq_notify 244 "
    "mq_getsetattr 245",
    "memory that no limit counts": "memfd_create 319 memfd_secret 447",
    "the machine": "create_module 174 init_module 175 delete_module 176 finit_module 313 kexec_load 246 kexec_file_load 320 "
    "reboot 169 swapon 167 swapoff 168 acct 163 quotactl 179 quotactl_fd 443 settimeofday 164 clock_settime 227 adjtimex 159 "
    "clock_adjtime 305 sethostname 170 setdomainname 171 syslog 103 vhangup 153",
    "files past their paths": "open_by_handle_at 304 name_to_handle_at 303 fanotify_init 300 fanotify_mark 301",
    "processor modes": "modify_ldt 154 ioperm 173 iopl 172",
}
# Landlock does not cover these. Without a mount namespace the host's files are visible: the owner of a file may change the
# first, every process with write access the others.
_ATTRIBUTES_OF_OWN = "chmod 90 fchmod 91 fchmodat 268 fchmodat2 452 chown 92 fchown 93 lchown 94 fchownat 260 file_setattr 469"
_ATTRIBUTES_OF_WRITABLE = (
    "setxattr 188 lsetxattr 189 fsetxattr 190 setxattrat 463 removexattr 197 lremovexattr 198 fremovexattr 199 "
    "removexattrat 466 utime 132 utimes 235 futimesat 261 utimensat 280"
)
# All calls see the same system files: a lock or a watch on one would be a message to another call, or block the host.
_MAILBOXES = "flock 73 inotify_init 253 inotify_init1 294 inotify_add_watch 254"
_SIGNALS = "tkill 200 tgkill 234 rt_sigqueueinfo 129 rt_tgsigqueueinfo 297 pidfd_send_signal 424"
# With rules of their own.
_OTHERS = (
    "accept 43 accept4 288 bind 49 clone 56 clone3 435 connect 42 fcntl 72 ioprio_set 251 kill 62 landlock_add_rule 445 "
    "landlock_create_ruleset 444 landlock_restrict_self 446 listen 50 mount 165 personality 135 prlimit64 302 "
    "sched_setaffinity 203 sched_setattr 314 sched_setparam 142 sched_setscheduler 144 setpgid 109 setpriority 141 "
    "setrlimit 160 setsid 112 setsockopt 54 socket 41 socketpair 53 unshare 272"
)
_GROUPS = (*_REFUSED_CALLS.values(), _ATTRIBUTES_OF_OWN, _ATTRIBUTES_OF_WRITABLE, _MAILBOXES, _SIGNALS, _OTHERS)
_WORDS = " ".join(_GROUPS).split()
_NUMBERS = dict(zip(_WORDS[::2], map(int, _WORDS[1::2]), strict=True))
_FIRST_UNKNOWN = 470  # Linux 6.18 ends at 469


def numbers() -> dict[str, int]:
    """Name -> number of the calls of this machine. Raises `OSError` when it is not an x86_64."""
    if platform.machine() != "x86_64":
        raise OSError(errno.ENOSYS, f"no table of system calls for {platform.machine()}, only for x86_64")
    return _NUMBERS


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


class Filter:
    """A filter in the layout of the kernel, prepared once so that a child only passes a pointer."""

    def __init__(self, code: bytes, *, has_listener: bool = False) -> None:
        self.code = code
        self.num_instructions = len(code) // 8
        self.has_listener = has_listener
        self._memory = ctypes.create_string_buffer(code, len(code))
        self._program = _Program(length=self.num_instructions, instructions=ctypes.addressof(self._memory))
        self.pointer = ctypes.byref(self._program)


def build(
    *, is_namespaced: bool, in_session: bool = False, has_own_uid: bool = False, are_signals_scoped: bool = False
) -> Filter:
    """The filter for a program; built once, before the forks.

    Args:
        is_namespaced: the program has its own pid and mount namespaces. Without them the filter also keeps it in its process
            group, so that one kill of the group reaches every descendant, and forbids it to change the attributes of files
            and to send signals, unless one of the two arguments below makes that harmless.
        in_session: a request for a namespace or a mount waits for the answer of the supervisor, through the listener of
            `install`, and the limit of processes is fixed, since it also bounds the copies of the session.
        has_own_uid: no other process on the machine has its uid, and no other file: it may change the owner of its files.
        are_signals_scoped: Landlock keeps its signals inside (ABI 6). Otherwise a program can only signal its whole process
            group (`kill(0, ...)`), and cannot end one of its children.

    Raises:
        OSError: no table of system calls for this machine.
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
    known = numbers()
    rules_by_number = {known[name]: rule for name, rule in rules.items()}
    return Filter(assemble(rules_by_number, ends={_FIRST_UNKNOWN: _ABSENT, _FOREIGN: KILL}), has_listener=in_session)


def install(program: Filter) -> int:
    """Put the calling thread under the filter for good. Returns the listener of a session's filter, close-on-exec, or -1.

    Only the supervisor may have the listener: its holder answers the requests.
    """
    kernel.check(kernel.libc.prctl(kernel.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "set no_new_privs")
    flags = _NEW_LISTENER if program.has_listener else 0
    number = numbers()["seccomp"]
    result = kernel.check(kernel.libc.syscall(number, _SET_MODE_FILTER, flags, program.pointer), "install a seccomp filter")
    return result if program.has_listener else -1


def _always(*, privileged: Rule) -> dict[str, Rule]:
    """The rules of every level; `privileged` is the answer to a request for namespaces or mounts."""
    rules: dict[str, Rule] = {}
    for names in _REFUSED_CALLS.values():
        rules |= _each(names, _REFUSED)
    rules |= _each("unshare mount", privileged)
    rules |= _each("bind connect listen accept accept4", _UNREACHABLE)
    rules |= _each("sched_setparam sched_setscheduler sched_setaffinity sched_setattr prlimit64", _only(0, 0))
    for command in (_F_SETOWN, _F_SETOWN_EX, _F_SETLEASE, _F_NOTIFY):  # signals to others; files that others wait for
        rules["fcntl"] = Test(argument=1, equals=command, then=_REFUSED, otherwise=rules.get("fcntl", ALLOW))
    for option in (_SO_SNDBUF, _SO_RCVBUF, _SO_SNDBUFFORCE, _SO_RCVBUFFORCE):  # kernel memory that no limit counts
        of_socket = Test(argument=1, equals=_SOL_SOCKET, then=_REFUSED, otherwise=ALLOW)
        rules["setsockopt"] = Test(argument=2, equals=option, then=of_socket, otherwise=rules.get("setsockopt", ALLOW))
    unix = Test(
        argument=1,
        mask=_SOCK_TYPE_MASK,
        equals=_SOCK_STREAM,
        then=ALLOW,
        # No datagrams: sendmsg takes an address that no filter sees, such as the socket of a service on the host.
        otherwise=Test(argument=1, mask=_SOCK_TYPE_MASK, equals=_SOCK_SEQPACKET, then=ALLOW, otherwise=_UNREACHABLE),
    )
    rules |= _each("socket socketpair", Test(argument=0, equals=_AF_UNIX, then=unix, otherwise=_UNREACHABLE))
    no_namespace = Test(argument=0, mask=_CLONE_NEW, equals=0, then=ALLOW, otherwise=privileged)
    return rules | {
        "clone": Test(argument=0, mask=_CLONE_PARENT, equals=0, then=no_namespace, otherwise=_REFUSED),
        "clone3": _ABSENT,  # its flags are in memory, which no filter sees; libc falls back to clone
        "setpriority": _only(0, _PRIO_PROCESS, then=_only(1, 0)),
        "ioprio_set": _only(0, _IOPRIO_WHO_PROCESS, then=_only(1, 0)),
        "personality": _only(0, _PERSONALITY_QUERY),
    }


def _fixed_limit(kind: int) -> dict[str, Rule]:
    """The limit can be read, and not be set."""
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
    return {name: rule for name in names.split() if not name.isdigit()}


def _only(argument: int, value: int, *, then: Rule = ALLOW) -> Rule:
    """Refused unless `argument` is `value`; pid 0 is the caller."""
    return Test(argument=argument, equals=value, then=then, otherwise=_REFUSED)


# The supervisor's side of a session's filter.

_NOTIFICATION = struct.Struct("=QIIiIQ6Q")  # struct seccomp_notif: id, pid, flags, number, architecture, address, arguments
_ANSWER = struct.Struct("=QqiI")  # struct seccomp_notif_resp: id, value, error, flags
_RECEIVE, _SEND = 0xC0502100, 0xC0182101
_CONTINUE = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Notification:
    """A system call that waits for an answer. The memory behind its arguments may change, so do not trust it."""

    id: int
    pid: int  # of the thread, in the pid namespace of the receiver; 0 if it is not in there
    name: str
    arguments: tuple[int, ...]


def receive(listener: int) -> Notification | None:
    """Return the next request, or None when its process is gone. Waits for one, so poll first.

    Raises:
        OSError: no process is left under the filter.
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
    """Let the call happen. False when its process is gone, or has its answer."""
    return _answer(listener, _ANSWER.pack(ticket, 0, 0, _CONTINUE))


def refuse(listener: int, ticket: int, error: int = errno.EPERM) -> bool:
    """Let the call fail with `error`. False when its process is gone, or has its answer."""
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
    return next((name for name, known in numbers().items() if known == number), str(number))
