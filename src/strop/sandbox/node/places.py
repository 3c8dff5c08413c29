"""Hides where this machine keeps its interpreter, its libraries and the runner from whoever reads what a program printed."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from strop.sandbox.inside import wire
from strop.sandbox.inside.filesystem import place_inside

_NAMES = {
    str(Path(wire.__file__).parent): "runner",
    **{sysconfig.get_path(name): "python" for name in ("stdlib", "platstdlib")},
    **{sysconfig.get_path(name): "site-packages" for name in ("purelib", "platlib")},
    sys.prefix: "python-prefix",
    sys.base_prefix: "python-prefix",
}
_SHARED = {"/", "/usr", "/usr/local"}  # prefixes that say nothing of this machine
_PLACES = sorted(
    {(seen, name) for place, name in _NAMES.items() if place not in _SHARED for seen in (place, place_inside(place))},
    key=lambda pair: -len(pair[0]),
)


def hide_places(text: str) -> str:
    """`text` with neutral names for them: it then is the same on every machine."""
    for place, name in _PLACES:
        text = text.replace(place, name)
    return text
