"""Keeps the root links out of collection: they open the same files as `sp_compile/`, under a second module name."""

collect_ignore = ["bench", "examples", "kernels", "lowering", "passes", "sp_compile"]
