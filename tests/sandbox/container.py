"""Runs a command as if in a container whose profile allows no namespaces; a script for tests.

    python container.py [--deny-landlock] [--allow-namespaces] [--unprivileged] COMMAND...

Refuses what the default profile of common container runtimes refuses a container without capabilities. `--deny-landlock` is an
older runtime, whose profile does not know Landlock; `--allow-namespaces` a container without a profile; `--unprivileged` gives
up root first.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
import types
from pathlib import Path

package = types.ModuleType("strop_inside")
package.__path__ = [str(Path(__file__).parents[2] / "src/strop/sandbox/inside")]
sys.modules["strop_inside"] = package

from strop_inside import kernel, seccomp  # type: ignore[import-not-found]  # noqa: E402

UNPRIVILEGED = 65_534
_REFUSED = (
    "unshare mount umount2 setns pivot_root move_mount open_tree fsopen fsconfig fsmount fspick mount_setattr bpf "
    "perf_event_open keyctl add_key request_key open_by_handle_at userfaultfd io_uring_setup io_uring_enter io_uring_register"
)
_NEW_NAMESPACES = 0x7E020000


def profile(*, denies_landlock: bool) -> seccomp.Filter:
    refused = seccomp.fail(errno.EPERM)
    names = _REFUSED + (" landlock_create_ruleset landlock_add_rule landlock_restrict_self" if denies_landlock else "")
    rules = dict.fromkeys(names.split(), refused)
    rules["clone"] = seccomp.Test(argument=0, mask=_NEW_NAMESPACES, equals=0, then=seccomp.ALLOW, otherwise=refused)
    rules["clone3"] = seccomp.fail(errno.ENOSYS)
    numbers = seccomp.numbers()
    by_number = {numbers[name]: rule for name, rule in rules.items()}
    return seccomp.Filter(seccomp.assemble(by_number, ends={}))


def become_unprivileged() -> None:
    """Another uid than root's, for which the interpreter stays in reach: by a mount of its own, if it lies in a closed home."""
    if closed := _closed_above(Path(sys.base_prefix)):
        kernel.check(kernel.libc.unshare(kernel.CLONE_NEWNS), "unshare a mount namespace")
        kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
        prefix = os.open(sys.base_prefix, os.O_PATH | os.O_CLOEXEC)
        kernel.mount("none", str(closed), "tmpfs", kernel.MS_NOSUID, "mode=0755")
        Path(sys.base_prefix).mkdir(parents=True)
        kernel.mount(f"/proc/self/fd/{prefix}", sys.base_prefix, "", kernel.MS_BIND)
    os.setgroups([])
    os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    kernel.prctl(kernel.PR_SET_DUMPABLE, 1)


def _closed_above(path: Path) -> Path | None:
    return next((parent for parent in reversed(path.parents) if not parent.stat().st_mode & 0o001), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deny-landlock", action="store_true")
    parser.add_argument("--allow-namespaces", action="store_true")
    parser.add_argument("--unprivileged", action="store_true")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    arguments = parser.parse_args()
    if arguments.unprivileged and os.geteuid() == 0:
        become_unprivileged()
    if not arguments.allow_namespaces:
        seccomp.install(profile(denies_landlock=arguments.deny_landlock))
    os.execvp(arguments.command[0], arguments.command)


if __name__ == "__main__":
    main()
