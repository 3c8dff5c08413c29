"""Methods: what to keep of a group, what each token deserves, what it costs. One file each, pure functions."""
