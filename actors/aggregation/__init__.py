"""How updates become one model: exact sums, strategies, clipping. Pure: no bus, no clock."""
