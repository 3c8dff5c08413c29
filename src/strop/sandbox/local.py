"""The embedded start: the code service of this machine inside a program that has an event loop of its own."""

from __future__ import annotations

from strop.sandbox.node.node import Node


class LocalSandbox(Node):
    """A `CodeService` on this machine; use as `async with`, or call `start` and `close`. Belongs to one event loop."""
