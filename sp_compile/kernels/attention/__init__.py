"""Implementations of `sp_compile::attention`. Derivations: README.md in this folder."""
