"""Recurrent ops on the CPU and on any other device, as plain torch code. Derivations: README.md in this folder."""
