"""Attention on a forest in Triton; see README.md. Importing the package imports no Triton."""
