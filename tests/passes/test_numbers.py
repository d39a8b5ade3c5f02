"""Numbers of sizes in a rewritten graph: the code that is written for an expression computes what Python computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from sp_compile.errors import CannotShare
from sp_compile.passes.numbers import write_number

NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "true division": lambda rows, columns: columns / 4,
    "of two sizes": lambda rows, columns: columns / rows,
    "times a fraction": lambda rows, columns: columns * 0.3 + rows,
    "cut to a whole number": lambda rows, columns: torch.sym_int(columns * 0.3),
    "cut to a negative one": lambda rows, columns: torch.sym_int(columns * -0.3),
    "floor": lambda rows, columns: math.floor(columns * 0.3),
    "ceiling": lambda rows, columns: math.ceil(columns / 3),
    "rounded": lambda rows, columns: round(columns / 3),
    "root": lambda rows, columns: torch._sym_sqrt(columns / 4),
    "power": lambda rows, columns: (columns / 8) ** 1.5,
    "inverse root": lambda rows, columns: columns**-0.5,
    "integers": lambda rows, columns: (columns + 3) // 4 * 4 % (rows + 2) - columns,
    "bounds": lambda rows, columns: torch.sym_max(torch.sym_min(columns / 4, 2.5), rows * 0.25),
    "comparison": lambda rows, columns: columns / 2 > rows,
}


def symbols(rows: int, columns: int) -> list[torch.SymInt]:
    env = ShapeEnv(duck_shape=False)
    made = []
    for name, hint in (("B", rows), ("L", columns)):
        source = ConstantSource(name)
        symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
        made.append(env.create_symintnode(symbol, hint=hint, source=source))
    return made  # type: ignore[return-value]


@pytest.mark.parametrize("name", NUMBERS)
def test_code_computes_the_number(name: str) -> None:
    function = NUMBERS[name]
    rows, columns = symbols(4, 13)
    graph = torch.fx.Graph()
    inputs = {rows.node.expr: graph.placeholder("rows"), columns.node.expr: graph.placeholder("columns")}
    graph.output(write_number(function(rows, columns), inputs))
    call = torch.fx.GraphModule({}, graph)
    for sizes in ((4, 13), (2, 5), (7, 64), (3, 6)):
        found, wanted = call(*sizes), function(*sizes)
        assert type(found) is type(wanted)
        assert found == pytest.approx(wanted, rel=1e-14)


@pytest.mark.parametrize("name", NUMBERS)
def test_constants_are_computed(name: str) -> None:
    rows, columns = symbols(4, 13)
    found = write_number(NUMBERS[name](rows, columns), {rows.node.expr: 3, columns.node.expr: 10})
    assert found == pytest.approx(NUMBERS[name](3, 10), rel=1e-14)


def test_what_cannot_be_written_is_refused() -> None:
    rows, columns = symbols(4, 13)
    graph = torch.fx.Graph()
    inputs = {rows.node.expr: graph.placeholder("rows"), columns.node.expr: graph.placeholder("columns")}
    with pytest.raises(CannotShare, match="cannot be written as code"):
        write_number(torch._sym_sin(columns / rows), inputs)
