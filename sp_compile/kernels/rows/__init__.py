"""Reductions of wide rows."""
