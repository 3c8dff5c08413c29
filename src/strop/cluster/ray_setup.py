"""Ray itself: whether it is installed, its settings, and its start or the connection to a cluster that runs."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import threading
from collections.abc import Mapping
from typing import Any

from strop.cluster.placement import ClusterConfig
from strop.errors import ActorsLost, UserError

LOGS = "Its logs are in /tmp/ray/session_latest/logs. Start again with the same command."
RAY_ENVIRONMENT: Mapping[str, str] = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",  # else everybody who reaches a port runs programs
    "RAY_worker_niceness": "0",  # else what it starts has to wait for all other programs of its node
    "RAY_memory_monitor_refresh_ms": "0",  # else it kills processes where memory is nearly full
    # A node that is cut off is lost after 10 s, not after a minute.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""Variables of `ray start` on every node, and of the program that uses the cluster."""

_HTTP2_SETTINGS = b"\x04"  # of a frame, what stands after its length
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + _HTTP2_SETTINGS + bytes(5)  # RFC 9113, section 3.4
_CONNECT_S = 3.5


def check_installed(key: str, *, instead: str = "") -> None:
    """Raises `UserError` if Ray, which `key` of the recipe needs, is not installed. Does not import it."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{key} needs Ray, which is not installed. Install it with: pip install 'strop[cluster]'.{instead}")


def start_or_join(ray: Any, key: str, config: ClusterConfig | None) -> None:
    """Connect to the cluster of a recipe, or start one of this machine.

    Raises:
        UserError: no cluster is at the address, or the program has called `ray.init` itself.
        ActorsLost: Ray does not start.
    """
    if ray.is_initialized():
        raise UserError(f"{key}: this program has called ray.init. Leave that to strop.")
    on_termination = signal.getsignal(signal.SIGTERM)
    quietly = {"log_to_driver": False, "configure_logging": False, "logging_level": "ERROR"}
    if config is None:
        try:
            ray.init("local", include_dashboard=False, **quietly)
        except Exception as error:  # of many classes: whatever keeps it from starting
            raise ActorsLost(f"{key}: Ray did not start: {first_line(error)}. {LOGS}") from error
    else:
        try:
            _check_listens(config.address)  # else Ray tries for minutes
            ray.init(config.address, **quietly)
        except Exception as error:
            raise UserError(
                f"cluster.address: no Ray cluster at {config.address!r}: {first_line(error)}. Start one with `ray start` on"
                " each node, or with `strop cluster up --local 2` on this machine."
            ) from error
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, on_termination)  # Ray replaces it


def _check_listens(address: str) -> None:
    """Raises `OSError` or `ValueError` if nothing that may be Ray listens at host:port."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError("it is not host:port, nor auto")
    with socket.create_connection((host, int(port)), timeout=_CONNECT_S) as connection:
        if os.environ.get("RAY_USE_TLS") == "1":
            return
        connection.sendall(_HTTP2_GREETING)
        if connection.recv(4)[3:] != _HTTP2_SETTINGS:
            raise ValueError("something else listens there")


def free_port() -> int:
    """Return a port of this machine at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("", 0))
        port: int = taken.getsockname()[1]
        return port


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")
