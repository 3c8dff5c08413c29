"""Loads modules before the first fork, so that a program that imports them starts fast.

A fork of a process with much memory costs more than one of a bare interpreter. So there are several profiles, and a program
runs in the smallest that has its imports. A wrong choice costs time, never correctness.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import linecache
import os

from . import kernel, program, verify

_STANDARD = """
math cmath itertools functools collections collections.abc fractions decimal random re string heapq bisect statistics datetime
operator copy typing json io time
"""
_NUMPY = _STANDARD + "numpy numpy.linalg numpy.random numpy.fft numpy.polynomial"
_FULL = (
    _NUMPY
    + """
mpmath sympy sympy.abc sympy.solvers sympy.ntheory sympy.combinatorics sympy.geometry sympy.stats
scipy.special scipy.optimize scipy.integrate scipy.linalg scipy.stats scipy.sparse
"""
)
MODULES = {"bare": _STANDARD, "numpy": _NUMPY, "full": _FULL, "verify": ""}

_PRIMING = {
    "bare": "print(sum(n * n for n in range(9)))",
    "numpy": "import numpy as np\nprint(np.linalg.det(np.arange(9.0).reshape(3, 3) + np.eye(3)), np.arange(5).sum())",
    "full": """
import numpy as np, sympy as sp
x, y = sp.symbols("x y")
str(sp.solve(x**2 - 5*x + 6, x)), str(sp.solve([x + y - 3, x - y - 1], [x, y]))
str(sp.simplify(sp.sin(x)**2 + sp.cos(x)**2)), str(sp.integrate(x**2 * sp.exp(x), x)), str(sp.factor(x**3 - 1))
sp.factorint(360), str(sp.expand((x + 1)**5)), sp.latex(x**2 / 3), str(sp.limit(sp.sin(x) / x, x, 0))
str(sp.diff(sp.log(x) * sp.sqrt(x), x)), str(sp.Rational(1, 3) + sp.sqrt(2)), sp.N(sp.pi, 30)
np.linalg.eigvals(np.eye(3) + 1)
""",
}


def load(profile: str, extra: list[str]) -> None:
    """Import the installed modules of `profile`, and `extra`, and run some of their code.

    Raises:
        ImportError: a module of `extra` is missing.
    """
    if profile == "verify":
        verify.prime()
    for name in MODULES[profile].split():
        with contextlib.suppress(ImportError):  # scipy is optional
            importlib.import_module(name)
    for name in extra:
        importlib.import_module(name)
    if code := _PRIMING.get(profile):
        with contextlib.suppress(ImportError), open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            exec(compile(code, "<code>", "exec"), {})
    try:
        exec(compile("1 / 0", "<code>", "exec"), {})
    except ZeroDivisionError as error:
        program.format_error(error)
    linecache.clearcache()


def collapse(proc: int) -> None:
    """Ask for huge pages under the heap: a fork then copies one entry instead of 512. Failure does not matter."""
    with open(os.open("self/maps", os.O_RDONLY, dir_fd=proc)) as maps:
        for line in maps.read().splitlines():
            place, rights, *rest = line.split(maxsplit=5)
            is_anonymous = len(rest) < 4 or rest[3] == "[heap]"
            start, end = (int(part, 16) for part in place.split("-"))
            if is_anonymous and rights.startswith("rw") and end - start >= 2 << 20:
                kernel.libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), kernel.MADV_COLLAPSE)
