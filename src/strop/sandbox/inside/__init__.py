"""What runs inside the sandbox: fork servers and their confined children. Imports only the standard library."""
