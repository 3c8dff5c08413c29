"""What an engine in a process of its own is made of: where it is born, what it is told, how it gets its weights."""
