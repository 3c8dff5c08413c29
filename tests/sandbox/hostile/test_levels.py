"""A level that this machine can give must be given. The kernel and util-linux are asked, not our own code."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from strop.sandbox import IsolationLevel

from .case import CONFINED, NAMESPACES, STRICT
from .contexts import Context, Player

_LANDLOCK_CREATE_RULESET, _ASK_VERSION = 444, 1  # on every architecture
_LANDLOCK_WITH_TCP = 4


def _allows_namespaces() -> bool:
    attempt = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--ipc", "--uts", "--fork", "true"]
    return subprocess.run(attempt, capture_output=True, check=False).returncode == 0


def _allows_confinement() -> bool:
    version = ctypes.CDLL(None).syscall(_LANDLOCK_CREATE_RULESET, None, ctypes.c_size_t(0), _ASK_VERSION)
    has_filters = "errno" in Path("/proc/sys/kernel/seccomp/actions_avail").read_text().split()
    return version >= _LANDLOCK_WITH_TCP and has_filters


@pytest.mark.sandbox
@pytest.mark.slow
@pytest.mark.parametrize(
    ("context", "level", "is_possible"),
    [
        (Context.AS_WE_ARE, STRICT, _allows_namespaces),
        (Context.AS_WE_ARE, NAMESPACES, _allows_namespaces),
        (Context.AS_WE_ARE, CONFINED, _allows_confinement),
        (Context.UNPRIVILEGED, NAMESPACES, _allows_namespaces),
        (Context.UNPRIVILEGED, CONFINED, _allows_confinement),
        (Context.CONTAINER, CONFINED, _allows_confinement),
    ],
)
def test_a_level_that_the_machine_allows_is_given(
    player: Callable[[Context, IsolationLevel], Player],
    context: Context,
    level: IsolationLevel,
    is_possible: Callable[[], bool],
) -> None:
    if not is_possible():
        pytest.skip(f"the kernel of this machine does not allow what level {level} needs")
    assert player(context, level).greeting.get("level") == level, player(context, level).greeting.get("refused")


@pytest.mark.sandbox
@pytest.mark.slow
def test_a_container_gives_no_namespaces_and_says_so(player: Callable[[Context, IsolationLevel], Player]) -> None:
    assert "namespaces" in str(player(Context.CONTAINER, NAMESPACES).greeting["refused"])
