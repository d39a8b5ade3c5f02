"""Which kernel computes each semantic op: one table of implementations per op, one file per op."""
