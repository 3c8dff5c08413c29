"""Builds the root that programs see: system and libraries read-only, five devices, and a private /tmp for each call."""

from __future__ import annotations

import ctypes
import os

from . import kernel
from .wire import WORK_DIRECTORY

_DEVICES = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"]
_TMP_OPTIONS = b"size=64m,nr_inodes=4096,mode=0777"


def build_root(paths: list[str]) -> None:
    """Replace the root of the host by one with `paths` and the devices. Needs a new mount namespace."""
    sources = {path: os.path.realpath(path) for path in [*paths, *_DEVICES]}  # links point elsewhere after the root has moved
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("tmpfs", "/tmp", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=0755,size=1m")
    for name in ("/tmp/old", "/tmp/new"):
        os.mkdir(name)
    kernel.mount("/tmp/new", "/tmp/new", "", kernel.MS_BIND)
    kernel.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    for path, source in sources.items():
        _show(path, source)
    os.mkdir("/new/tmp")
    os.symlink("/tmp/shm", "/new/dev/shm")
    kernel.pivot_root("/new", "/new/tmp")
    os.chdir("/")
    kernel.check(kernel.libc.umount2(b"/tmp", kernel.MNT_DETACH), "umount the host's root")
    flags = kernel.MS_REMOUNT | kernel.MS_BIND | kernel.MS_RDONLY | kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("none", "/", "", flags)


def mount_tmp() -> None:
    """Mount an empty /tmp with limits of bytes and files. Needs a new mount namespace."""
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.check(kernel.libc.mount(b"tmpfs", b"/tmp", b"tmpfs", ctypes.c_ulong(flags), _TMP_OPTIONS), "mount /tmp")


def make_work_directory() -> None:
    os.umask(0)
    for path in (WORK_DIRECTORY, "/tmp/shm"):
        os.mkdir(path, 0o777)
    os.umask(0o022)


def place_inside(path: str) -> str:
    """Where a program finds the `path` of the host: /tmp is private, so what lies below it is shown elsewhere."""
    return f"/moved{path}" if path.startswith("/tmp/") else path


def _show(path: str, source: str) -> None:
    """Mount `source` of the host at `path`. Links to system directories stay links."""
    link, source, target = f"/old{path}", f"/old{source}", f"/new{place_inside(path)}"
    if source.startswith("/old/usr/") and os.path.islink(link):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.symlink(source.removeprefix("/old"), target)
        return
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    elif os.path.exists(source):
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    else:
        return
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.show_read_only(target, allows_devices=path.startswith("/dev/"))
