"""Graph rewrites, one per file; `runner.run_passes` runs them in the order of `pipeline`."""
