"""Compiles a graph with the inner compiler in a private shape environment, and checks that environment's guards on every call."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

Size = "int | str"


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor input whose sizes are numbers or names of symbols; contiguous."""

    sizes: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False


@dataclasses.dataclass
class Bucket:
    """One compiled form and the conditions on the sizes under which it is valid."""

    call: Callable[..., Any]
    symbols: dict[str, sympy.Symbol]
    guards: list[sympy.Expr]
    seconds: float

    def accepts(self, sizes: Mapping[str, int]) -> bool:
        if not self.guards:
            return True
        env = {symbol: sizes[name] for name, symbol in self.symbols.items()}
        return all(bool(sympy_interp(PythonReferenceAnalysis, env, guard)) for guard in self.guards)


INNER = ("inductor", "aot_eager", "eager")


def compile_bucket(module: torch.fx.GraphModule, inputs: Sequence[Any], sizes: Mapping[str, int], inner: str) -> Bucket:
    """Compile a graph for symbolic sizes.

    Args:
        module: the graph; its placeholders correspond to `inputs`.
        inputs: per placeholder a `TensorSpec`, a real tensor (parameters, buffers: sizes fixed), the name of a symbol, or a constant.
        sizes: the current value of each symbol.
        inner: "inductor", "aot_eager" or "eager".
    """
    started = time.perf_counter()
    env = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, export=False)
    made = {name: _symbol(env, name, value) for name, value in sizes.items()}
    fakes: list[Any] = []
    with mode:
        for given in inputs:
            if isinstance(given, TensorSpec):
                fake = torch.empty([made[s] if isinstance(s, str) else s for s in given.sizes], dtype=given.dtype, device=given.device)
                fakes.append(fake.requires_grad_(given.requires_grad))
            elif isinstance(given, torch.Tensor):
                fakes.append(mode.from_tensor(given, static_shapes=True))
            elif isinstance(given, str):
                fakes.append(made[given])
            else:
                fakes.append(given)
    if inner == "eager":
        call: Callable[..., Any] = module.forward
    else:
        with tracing(TracingContext(mode)):
            call = _backend(inner)(module, fakes)
    names = {name: size.node.expr if isinstance(size, torch.SymInt) else sympy.Symbol(name, integer=True) for name, size in made.items()}
    originals = {name: _original(env, name) for name in made}
    guards = [guard.expr for guard in env.guards]
    guards += [sympy.Eq(originals[name], names[name]) for name in made if originals[name] != names[name]]
    return Bucket(call, originals, guards, time.perf_counter() - started)


def _symbol(env: ShapeEnv, name: str, hint: int) -> torch.SymInt:
    source = ConstantSource(f"sp_{name}")
    hint = max(hint, 2)  # torch takes sizes 0 and 1 for constants; nothing in the graph depends on a size being one
    symbol = env.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    made = env.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(made, torch.SymInt), "a dynamic symbol is never specialised"
    return made


def _original(env: ShapeEnv, name: str) -> sympy.Symbol:
    wanted = f"sp_{name}"
    for symbol, sources in env.var_to_sources.items():
        if any(getattr(source, "source_name", None) == wanted for source in sources):
            return symbol
    raise AssertionError(f"symbol {name} is known to its environment")


def _backend(inner: str) -> Callable[..., Any]:
    if inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager
    from torch._inductor.compile_fx import compile_fx

    return compile_fx
