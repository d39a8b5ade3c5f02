"""Implementations of `sp_compile::gated_delta_rule` and `sp_compile::kda`. Derivations: README.md in this folder."""
