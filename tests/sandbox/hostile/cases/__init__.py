"""Every case by its name. A family is a file; a case is added to one by writing it there."""

from __future__ import annotations

from ..case import Case
from . import (
    disk,
    errors,
    files,
    kernel,
    memory,
    network,
    normal,
    output,
    poison,
    privileges,
    processes,
    secrets,
    signals,
    time,
)

_FAMILIES = (
    normal,
    errors,
    time,
    signals,
    processes,
    memory,
    output,
    disk,
    files,
    secrets,
    network,
    privileges,
    kernel,
    poison,
)

CASES: dict[str, Case] = {}
for _family in _FAMILIES:
    for _case in _family.CASES:
        if _case.name in CASES:
            raise ValueError(f"two hostile cases are called {_case.name!r}")
        CASES[_case.name] = _case
