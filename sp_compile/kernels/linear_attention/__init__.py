"""Implementations of `sp_compile::linear_attention`. Derivations: README.md in this folder."""
