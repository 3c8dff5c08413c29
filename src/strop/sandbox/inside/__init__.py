"""What runs inside the sandbox: fork servers and their confined children. At import, only the standard library."""
