"""A node across a connection: `RemoteNode` is the front's end of it, `serve_node` the node's."""

from strop.sandbox.service.channel import LinkTiming
from strop.sandbox.service.front_end import RemoteNode
from strop.sandbox.service.node_end import serve_node

__all__ = ["LinkTiming", "RemoteNode", "serve_node"]
