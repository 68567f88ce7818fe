"""Many clients in a few processes: a host that speaks for them over one session, and a pool of processes that train."""
