"""Running a controller, a client or a rank: from its configuration to its exit code, and what the console shows."""
