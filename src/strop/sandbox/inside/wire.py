"""The bytes that the supervisor, its fork server and a child exchange. All that both sides import."""

from __future__ import annotations

import struct

# supervisor -> fork server: one packet a child, with the descriptors exchange, wake and output, and its directory, ended by NUL
SPAWN = struct.Struct("<Q")  # id of the child
NUM_SPAWN_DESCRIPTORS = 3
MAX_SPAWN_BYTES = 512

# fork server -> supervisor
REPORT = struct.Struct("<IiQqQQ")  # kind, status, id of the child, pid, CPU time in us, largest resident set in KiB
KIND_HELLO, KIND_FAILED, KIND_STARTED, KIND_EXITED, KIND_SIGNALED, KIND_REFUSED = range(6)

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

# A session: its process and the supervisor share a line of packets, the first byte of each says what it is.
SESSION_MARK = "session:"  # before the directory in a spawn packet: `wake` is the line, the exchange holds a WORK header
LINE_BYTES = 131_072  # of the longest packet
# supervisor -> session
LINE_CELL = b"c"  # CELL, with the code and its stdin as sealed files
LINE_FORK = b"f"  # FORK, with (line, output) of each of the two branches
LINE_DRESS = b"g"  # to a branch that was born: the JSON of what it must give up
LINE_STEM = b"e"  # both branches live: become nothing but the parent of their namespaces
CELL = struct.Struct("<cQIIQI")  # LINE_CELL, the word of the cell, its number, length of the code, memory in bytes, file MiB
FORK = struct.Struct("<cQ")  # LINE_FORK, flags of clone
# session -> supervisor
LINE_HELLO = b"h"  # shut in; with the listener of its filter where it has one
LINE_FAILED = b"x"  # a step failed; the text says which
LINE_BEGAN = b"b"  # BEGAN
LINE_DONE = b"d"  # DONE, and the text behind it
LINE_BORN = b"n"  # ready for its first cell; of a branch: in its own namespaces
LINE_DRESSED = b"r"  # a branch: with its own files, and nothing else
BEGAN = struct.Struct("<cQ")  # LINE_BEGAN, the word of the cell
DONE = struct.Struct("<cQBc")  # LINE_DONE, the word of the cell, exit code, what the text is (a RECORD_* or a space)

# supervisor -> groundwork, with the descriptors said there; the answer is the id and an errno, and what failed behind it
GROUNDWORK = struct.Struct("<cQqqQI")  # step, id, process, uid of its namespaces' owner, processes allowed, inner uid
GROUND_RAISE = b"r"  # let a process start so many others; with its pidfd
GROUND_DRESS = b"d"  # a branch's uids, its /tmp and its processes; with the pidfds of its stem and of itself
GROUND_ANSWER = struct.Struct("<Qi")
MAX_FAMILY_PROCESSES = 2_048  # of all branches of one session together, as far as any of them may raise its limit
