"""The commands that start fork servers, and the profile of a program."""

from __future__ import annotations

import json
import os
import re
import sys
import sysconfig
from pathlib import Path

from strop.sandbox.inside import wire
from strop.sandbox.protocol import IsolationLevel

INSIDE = Path(wire.__file__).parent
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([\w., \t]+)", re.MULTILINE)
_NUMPY_NAMES = {"numpy"}
_FULL_NAMES = {"sympy", "scipy", "mpmath"}

ENVIRONMENT = {  # the whole environment of a program
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "HOME": wire.WORK_DIRECTORY,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "PYTHONHASHSEED": "0",
    "PYTHONUTF8": "1",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "1",  # otherwise each thread reserves 64 MiB of the address space of a program
}


def command(script: Path, level: IsolationLevel, profile: str, *, modules: tuple[str, ...] = (), **more: object) -> list[str]:
    """The command that runs `script` in a clean interpreter, with the settings of a fork server as its argument."""
    libraries = list(dict.fromkeys(sysconfig.get_path(name) for name in ("purelib", "platlib")))
    system = ["/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives"]
    shown: list[str] = []
    for path in [*system, sys.base_prefix, sys.prefix, *libraries]:
        if not any(Path(path).is_relative_to(other) for other in shown):
            shown.append(path)
    settings: dict[str, object] = {"level": level.value, "profile": profile, "modules": modules, "shown": shown}
    settings |= {"libraries": libraries, "supervisor": os.getpid(), **more}
    # -P and -s rather than -I, which would also ignore PYTHONHASHSEED.
    return [sys.executable, "-s", "-P", "-S", "-B", str(script), json.dumps(settings)]


def profile_of(code: str) -> str:
    """The smallest profile with the modules that `code` imports. A wrong guess costs time, never correctness."""
    if "import" not in code:
        return "bare"
    names = {name.strip().partition(" ")[0].partition(".")[0] for found in _IMPORT.findall(code) for name in found.split(",")}
    if names & _FULL_NAMES:
        return "full"
    return "numpy" if names & _NUMPY_NAMES else "bare"
