"""Engines in separate processes: fork server, messages, shared weights."""
