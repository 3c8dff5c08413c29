"""Compiles functions in C where there is a compiler and a processor for them, and compares them with torch before use."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

_T = TypeVar("_T")

_log = logging.getLogger(__name__)
_HEADERS = Path(__file__).parent
_COMPILE = ("-O3", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-std=gnu11")
_COMPILE_LIMIT_S = 120
AVX2 = frozenset({"avx2", "fma"})
AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq", "fma"})
AVX512_BF16 = AVX512 | {"avx512_bf16"}
AMX = frozenset({"amx_tile", "amx_bf16"})
"""Instructions that functions use, as /proc/cpuinfo names them."""


def proven(
    source: Path,
    instructions: frozenset[str],
    wrap: Callable[[ctypes.CDLL], _T],
    is_proven: Callable[[_T], bool],
    *,
    useful: frozenset[str] = frozenset(),
) -> _T | None:
    """Return the functions of `source`, or None if they cannot be compiled here or differ from torch. The log gives the reason.

    Args:
        instructions: that the processor must have: `AVX2` or `AVX512_BF16`.
        wrap: the library in Python.
        is_proven: whether it gives what torch gives.
        useful: instructions that it uses where processor and compiler have them.
    """
    if useful and has_processor(useful) and (best := proven(source, instructions | useful, wrap, is_proven)) is not None:
        return best
    try:
        if not has_processor(instructions):
            return None
        functions = wrap(ctypes.CDLL(str(_library(source, instructions))))
        # In a separate thread: the first caller may be inside autocast, inference mode or a checkpoint of activations.
        with ThreadPoolExecutor(max_workers=1) as aside:
            are_right = aside.submit(is_proven, functions).result()
        if are_right:
            return functions
        _log.warning("the compiled functions of %s differ from torch on this machine and are not used", source)
    except (OSError, subprocess.SubprocessError) as error:
        words = getattr(error, "stderr", None)
        _log.info(
            "the functions of %s are not compiled with %s: %s", source, sorted(instructions), (words or str(error)).strip()
        )
    return None


_KINDS: dict[str, Any] = {"i": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}


def typed(function: Any, arguments: str, result: str = "") -> Any:
    """Return a function of a library that takes int64 (i), float (f) and addresses (p), and gives nothing or one of these."""
    function.argtypes, function.restype = [_KINDS[each] for each in arguments], _KINDS.get(result)
    return function


def addresses(*tensors: Tensor | None) -> list[int | None]:
    """Return where the numbers of tensors lie; None for none."""
    return [None if each is None else each.data_ptr() for each in tensors]


def has_processor(instructions: frozenset[str]) -> bool:
    """Return whether the processor has the instructions. Only Linux on x86-64 can."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return instructions <= set(flags.split())


def _library(source: Path, instructions: frozenset[str]) -> Path:
    """Where the compiled code is, in the user's cache directory; compiles it first where it is not there yet.

    Raises:
        OSError: there is no compiler, or nowhere to write.
        subprocess.SubprocessError: it failed.
    """
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise OSError("there is no C compiler (cc, gcc or clang)")
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=_COMPILE_LIMIT_S)
    flags = (*_COMPILE, *sorted(f"-m{name.replace('amx_', 'amx-').replace('_', '')}" for name in instructions))
    headers = [each.read_text() for place in (_HEADERS, source.parent) for each in sorted(place.glob("*.h"))]
    content = "\n".join((source.read_text(), *headers, *flags, version.stdout, torch.__version__))
    name = f"{source.stem}-{hashlib.sha256(content.encode()).hexdigest()[:16]}.so"
    place = _private_directory() / name
    if not place.exists():
        with tempfile.TemporaryDirectory(dir=place.parent) as scratch:
            made, code = Path(scratch, "kernels.o"), Path(scratch, name)
            # Not linked with OpenMP: its functions are those of torch's own copy, so that both have one pool of threads.
            for command in (
                [compiler, *flags, f"-I{_HEADERS}", "-c", "-o", str(made), str(source)],
                [compiler, "-shared", "-o", str(code), str(made), "-lm"],
            ):
                subprocess.run(command, capture_output=True, text=True, check=True, timeout=_COMPILE_LIMIT_S)
            code.replace(place)
    return place


def _private_directory() -> Path:
    """Return strop's cache directory of the user, which no other user can write to.

    Raises:
        OSError: it belongs to somebody else, or cannot be made.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    place = Path(base, "strop")
    place.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = place.stat()
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(f"{place} can be written to by others; code from it is not run")
    return place
