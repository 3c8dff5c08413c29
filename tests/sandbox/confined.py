"""Runs a program under only the filter and the Landlock rules, without the rest of the service; a script for tests.

    echo CODE | python confined.py '{"filter": {"is_namespaced": true}, "rules": {"readable": ["/usr"], "writable": []}}'

The filter takes the arguments of `seccomp.build`, the rules those of `landlock.prepare`; either may be missing. The program's
own directory is the working directory.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path

package = types.ModuleType("strop_inside")  # as the fork server loads it: nothing else of strop needs to be importable
package.__path__ = [str(Path(__file__).parents[2] / "src/strop/sandbox/inside")]
sys.modules["strop_inside"] = package

from strop_inside import landlock, seccomp  # type: ignore[import-not-found]  # noqa: E402

settings = json.loads(sys.argv[1])
code = sys.stdin.read()
if "rules" in settings:
    landlock.restrict(landlock.prepare(**settings["rules"]), writable=os.getcwd())
if "filter" in settings:
    seccomp.install(seccomp.build(**settings["filter"]))
exec(compile(code, "<code>", "exec"), sys.modules["__main__"].__dict__)
