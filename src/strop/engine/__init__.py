"""Token ids in, token ids and log-probs out: the embedded engine, in this process or in an actor, servers, and a double."""
