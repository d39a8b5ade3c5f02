"""What each mixer and each row conversion means on a forest: schema, pure PyTorch semantics, fake kernel, tolerance.

Importing this package registers nothing; import the module of the op that is needed.
"""
