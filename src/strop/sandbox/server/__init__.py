"""The code service of one machine over HTTP: admission, ids of calls, and cached answers before the sandbox."""
