"""What runs inside a server, in the server's environment. This folder is put on its PYTHONPATH, so nothing else lies here."""
