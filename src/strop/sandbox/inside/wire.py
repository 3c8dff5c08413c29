"""The bytes that the supervisor, its fork server and a child exchange. All that both sides import."""

from __future__ import annotations

import struct

# supervisor -> fork server: one packet a child, with the descriptors exchange, wake and output, and the path of its directory
SPAWN = struct.Struct("<Q")  # id of the child
NUM_SPAWN_DESCRIPTORS = 3
MAX_SPAWN_BYTES = 512

# fork server -> supervisor
REPORT = struct.Struct("<IiQqQQ")  # kind, status, id of the child, pid, CPU time in us, largest resident set in KiB
KIND_HELLO, KIND_FAILED, KIND_STARTED, KIND_EXITED, KIND_SIGNALED = range(5)

# The exchange: a file in memory. The child's record lies first, the work that it is given behind it.
STAMP = struct.Struct("<d")  # when its work began, by the monotonic clock
RECORD_HEADER = struct.Struct("<cI")  # behind the stamp: what it is, length of the text
RECORD_BYTES = 65_536
RECORD_ECHO, RECORD_ERROR, RECORD_SETUP, RECORD_DONE = b"v", b"x", b"s", b"d"
WORK = struct.Struct("<cQQIIIII")  # job, seed, memory in bytes, CPU s, processes, file MiB, length of the code, length of stdin
JOB_PROGRAM, JOB_VERIFY, JOB_SESSION = b"p", b"v", b"n"

READY = b"\x01"  # the first byte on the output pipe, before anything that the program prints

MAX_TRACEBACK_CHARS = 8_000
WORK_DIRECTORY = "/tmp/work"
