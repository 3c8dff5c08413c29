"""What runs inside the sandbox: the fork server and its confined children. Standard library only; exec'ed alone."""
