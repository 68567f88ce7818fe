"""``gradbus relay``: a process that forwards between the links of others, stores nothing, and cannot read."""
