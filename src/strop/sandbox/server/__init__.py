"""The front of the code service: one queue before many nodes, reached over HTTP or from within a process."""
