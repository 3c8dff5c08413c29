"""strop: train language models to reason with tools by reinforcement learning, from a laptop to a cluster."""

__version__ = "0.1.0"
