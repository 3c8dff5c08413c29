"""The programs of the self-test: each attacks what a level promises and prints how far it got. A success does no harm.

A program reads its arguments from standard input. It reports an attempt as the errno that stopped it, or 0 for a success.
"""

from __future__ import annotations

_PRELUDE = """
import ctypes, errno, json, os, sys
given = json.loads(sys.stdin.read())
libc = ctypes.CDLL(None, use_errno=True)
facts = {}

def attempt(name, action):
    try:
        action()
        facts[name] = 0
    except MemoryError:
        facts[name] = errno.ENOMEM
    except (OSError, ValueError) as error:  # resource raises ValueError for what may not be raised
        facts[name] = getattr(error, "errno", None) or errno.EPERM

def call(function, *arguments):
    if function(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "refused")

def in_child(action):
    # A success changes only a child process.
    pid = os.fork()
    if pid == 0:
        try:
            action()
        except OSError as error:
            os._exit(error.errno)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    if status:
        raise OSError(os.WEXITSTATUS(status) if os.WIFEXITED(status) else errno.EPERM, "refused")
"""

REACH = (
    _PRELUDE
    + """
import resource, socket

others = {pid for pid in (os.getppid(), given["supervisor"]) if pid not in (0, os.getpid())}
facts["environment"] = any(given["canary"] in value for value in os.environ.values())
facts["parent"] = os.getppid()

def attempt_on_others(name, action):
    facts[name] = errno.ESRCH
    for pid in others:
        attempt(name, lambda: action(pid))
        if not facts[name]:
            break

def read_environment(pid):
    open(f"/proc/{pid}/environ", "rb").read(1)

def read_memory(pid):
    # Without the right to read this is EPERM; with it, EFAULT for the address 0.
    vector = (ctypes.c_size_t * 2)(0, 1)
    if libc.process_vm_readv(pid, vector, 1, vector, 1, 0) < 0 and ctypes.get_errno() != errno.EFAULT:
        raise OSError(ctypes.get_errno(), "refused")

attempt("read", lambda: open(given["file"]).close())
attempt("sight", lambda: os.stat(given["file"]))
attempt("write", lambda: open(given["file"], "a").close())
attempt("truncate", lambda: os.truncate(given["file"], os.stat(given["file"]).st_size))
attempt("create", lambda: open(given["directory"] + "/planted", "w").close())
attempt("chmod", lambda: os.chmod(given["file"], 0o666))
attempt_on_others("environ", read_environment)
attempt_on_others("signal", lambda pid: os.kill(pid, 0))
attempt_on_others("trace", lambda pid: call(libc.ptrace, 0x4206, pid, 0, 0))  # PTRACE_SEIZE: nothing stops
attempt_on_others("memory_of_others", read_memory)
attempt_on_others("limits_of_others", lambda pid: resource.prlimit(pid, resource.RLIMIT_CPU))
attempt_on_others("priority_of_others", lambda pid: os.sched_setaffinity(pid, os.sched_getaffinity(0)))

attempt("tcp", lambda: socket.create_connection(("127.0.0.1", given["tcp"]), 1).sendall(b"x"))
attempt("udp", lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", given["udp"])))
attempt("unix", lambda: socket.socket(socket.AF_UNIX).connect(given["unix"]))
attempt("abstract", lambda: socket.socket(socket.AF_UNIX).connect("\\0" + given["abstract"]))
attempt("datagram", lambda: socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"x", given["datagram"]))

def mount():
    call(libc.mount, b"none", b".", b"tmpfs", ctypes.c_ulong(0), None)
    libc.umount2(b".", 2)

def raise_limit(kind):
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY:  # else there is no limit to raise
        resource.setrlimit(kind, (hard + 1, hard + 1))

attempt("unshare", lambda: in_child(lambda: call(libc.unshare, 0x10000000)))  # CLONE_NEWUSER
attempt("mount", lambda: in_child(mount))
attempt("setns", lambda: call(libc.setns, 0, 0))
attempt("io_uring", lambda: call(libc.syscall, 425, 1, 0))
attempt("raise_processes", lambda: raise_limit(resource.RLIMIT_NPROC))
attempt("raise_memory", lambda: raise_limit(resource.RLIMIT_AS))
attempt("become_root", lambda: in_child(lambda: os.setresuid(0, 0, 0)))

def call_i386():
    import mmap
    page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    page.write(bytes.fromhex("b814000000" "cd80" "c3"))  # mov eax, getpid; int 0x80; ret
    ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()

if os.uname().machine == "x86_64":
    attempt("foreign_abi", lambda: in_child(call_i386))
else:
    facts["foreign_abi"] = errno.ENOSYS
print(json.dumps(facts))
"""
)

BOUNDS = (
    _PRELUDE
    + """
import mmap

# Without isolation this may be a user's directory: remove only what is made here.
own = f"strop-attack-{os.urandom(8).hex()}"
os.mkdir(own)
os.chdir(own)

attempt("memory", lambda: bytearray(given["memory_bytes"]))
attempt("mapping", lambda: mmap.mmap(-1, given["memory_bytes"]))

def overfill(path):
    with open(path, "wb", buffering=0) as file:
        while file.tell() <= given["file_bytes"]:
            file.write(bytes(1 << 16))

attempt("file", lambda: overfill("large"))

def fill_disk():
    # Reserves space instead of writing: the limit is the same, in a tenth of the time.
    for number in range(given["disk_bytes"] // given["file_bytes"]):
        with open(f"part-{number}", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, given["file_bytes"])

if given["disk_bytes"]:
    attempt("disk", fill_disk)
    facts["disk_bytes"] = sum(os.path.getsize(name) for name in os.listdir("."))
facts["files"] = os.statvfs(".").f_files
for name in os.listdir("."):
    os.unlink(name)
os.chdir("..")
os.rmdir(own)

def fork_on():
    for _ in range(given["processes"] + 32):  # others may come and go where they are counted together
        if os.fork() == 0:
            os.read(gate, 1)
            os._exit(0)
        facts["forks"] += 1

facts["forks"] = 0
gate, hold = os.pipe()
attempt("processes", lambda: fork_on())
os.write(hold, bytes(facts["forks"]))
for _ in range(facts["forks"]):
    os.wait()
print(json.dumps(facts))
"""
)

DAEMON = (
    _PRELUDE
    + """
import time
started, tell = os.pipe()

def detach():
    for leave in (os.setsid, os.setpgrp):
        try:
            leave()
        except OSError:
            pass
    if os.fork() == 0:
        libc.prctl(15, given["name"].encode(), 0, 0, 0)  # PR_SET_NAME
        os.write(tell, b"x")
        os.closerange(0, 256)
        time.sleep(30)
        os._exit(0)

attempt("detach", lambda: in_child(detach))
os.close(tell)
facts["started"] = len(os.read(started, 1))
print(json.dumps(facts))
"""
)

NEIGHBOUR = (
    _PRELUDE
    + """
import time
libc.prctl(15, given["mine"].encode(), 0, 0, 0)
open(given["mine"], "w").close()
facts.update(since=time.monotonic(), seen=[])

def look(place, depth):
    try:
        names = os.listdir(place)
    except OSError:
        return
    if given["other"] in names:
        facts["seen"].append(place)
    for name in names if depth else ():
        look(os.path.join(place, name), depth - 1)

while time.monotonic() < facts["since"] + given["seconds"] and not facts["seen"]:
    for place in ("..", "/tmp", "/var/tmp", "/dev/shm"):
        look(place, 1)
    time.sleep(0.01)
facts["until"] = time.monotonic()
print(json.dumps(facts))
"""
)
