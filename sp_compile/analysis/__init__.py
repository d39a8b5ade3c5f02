"""Token-layout analysis: which values of a captured graph are equal across the rows of a batch, and why.

`interpret.analyse` runs the captured graph once on fake tensors; `rules/` holds one rule per ATen overload.
"""
