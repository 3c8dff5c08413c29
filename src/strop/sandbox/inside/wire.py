"""The format of the messages between the supervisor, its fork servers and their children."""

from __future__ import annotations

import struct

# supervisor -> fork server: one packet a child, with the descriptors exchange, wake and output, and its directory, ended by NUL
SPAWN = struct.Struct("<Q")  # id of the child
MAX_SPAWN_BYTES = 512

# fork server -> supervisor
REPORT = struct.Struct("<IiQqQQ")  # kind, status, id of the child, pid, CPU time in us, largest resident set in KiB
KIND_HELLO, KIND_FAILED, KIND_STARTED, KIND_EXITED, KIND_SIGNALED, KIND_REFUSED = range(6)

# The exchange: a file in memory. The record of the child comes first, then its work.
STAMP = struct.Struct("<d")  # start of its work on the monotonic clock
RECORD_HEADER = struct.Struct("<cI")  # after the stamp: kind and length of the text
RECORD_BYTES = 65_536
RECORD_NOTHING, RECORD_ECHO, RECORD_ERROR, RECORD_SETUP = b" ", b"v", b"x", b"s"
WORK = struct.Struct("<cQQIIIII")  # job, seed, memory in bytes, CPU s, processes, file MiB, length of the code, length of stdin
JOB_PROGRAM, JOB_VERIFY, JOB_SESSION = b"p", b"v", b"n"

FLUSH_SIGNAL = 64  # SIGRTMAX, at the deadline of a program: write out the line that it has begun
READY = b"\x01"  # the first byte on the output pipe, before anything that the program prints

MAX_TRACEBACK_CHARS = 8_000
WORK_DIRECTORY = "/tmp/work"

# A session: its process and the supervisor exchange packets over a line; the first byte is the kind. A nonce is bytes: integers
# of different size would move the objects of a cell, so that `repr(object())` differs.
SESSION_MARK = "session:"  # before the directory in a spawn packet: `wake` is the line, the exchange holds a WORK header
LINE_BYTES = 131_072  # longest packet
# supervisor -> session
LINE_CELL = b"c"  # CELL, with the code and its stdin as sealed files
LINE_FORK = b"f"  # FORK, with (line, output) of each of the two copies
LINE_DRESS = b"g"  # to a copy that was born: its /tmp is mounted
LINE_STEM = b"e"  # both copies are accepted: execute a program that sleeps
CELL = struct.Struct("<c8sIIQI")  # LINE_CELL, the nonce of the cell, its number, length of the code, memory in bytes, file MiB
FORK = struct.Struct("<cQ")  # LINE_FORK, flags of clone
# session -> supervisor
LINE_HELLO = b"h"  # confined; with the listener of its filter if it has one
LINE_FAILED = b"x"  # a step failed; the text names it
LINE_BEGAN = b"b"  # BEGAN
LINE_DONE = b"d"  # DONE, then the text
LINE_BORN = b"n"  # ready for its first cell; of a copy: in its own namespaces
LINE_DRESSED = b"r"  # a copy: its files are copied
BEGAN = struct.Struct("<c8s")  # LINE_BEGAN, the nonce of the cell
DONE = struct.Struct("<c8sBc")  # LINE_DONE, the nonce of the cell, exit code, kind of the text

# supervisor -> the helper of `confine`, with the descriptors named there. The answer is STEP_DONE, or what failed.
NAMESPACE_STEP = struct.Struct("<cqqQI")  # step, process, uid of the owner of its namespaces, processes allowed, inner uid
STEP_LIMIT = b"r"  # set the limit of processes of a midwife; with the pidfd of that process
STEP_PREPARE = b"d"  # map the uid of a copy, mount its /tmp, set its limit; with the pidfds of its origin and of the copy
STEP_DONE = b"\0"
MAX_FAMILY_PROCESSES = 2_048  # of all copies of one session together
