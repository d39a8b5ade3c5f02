"""One rule per ATen overload, grouped by family; importing this package registers them all."""

from sp_compile.analysis.rules import complex_numbers, creation, experts, indexing, linear, moves, pointwise, reductions, views
from sp_compile.analysis.rules.registry import RULES, Call, NotPackable, judge, rule

__all__ = [
    "RULES",
    "Call",
    "NotPackable",
    "complex_numbers",
    "creation",
    "experts",
    "indexing",
    "judge",
    "linear",
    "moves",
    "pointwise",
    "reductions",
    "rule",
    "views",
]
