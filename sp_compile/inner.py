"""Compiles a graph with the inner compiler in a private shape environment, and checks that environment's guards on every call."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import hashlib
import pathlib
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx
from torch._dynamo import convert_frame
from torch._dynamo.source import ConstantSource
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from sp_compile.capture import selective
from sp_compile.capture.checkpoint import TAGS

Size = "int | str"

LOCK: threading.RLock = convert_frame.compile_lock
"""Held while anything is compiled. It is Dynamo's own, which torch takes for traces and for backward graphs: all of them change
settings of the process, and a second lock could be taken in another order."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor input whose sizes are numbers or names of symbols; contiguous."""

    sizes: tuple[int | str, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False


@dataclasses.dataclass
class Bucket:
    """One compiled form and the conditions on the sizes under which it is valid; `exact`: it was compiled for these alone."""

    call: Callable[..., Any]
    symbols: dict[str, sympy.Symbol]
    guards: list[sympy.Expr]
    seconds: float
    trained: tuple[bool, ...] | None = None
    exact: Mapping[str, int] | None = None

    def accepts(self, sizes: Mapping[str, int], trained: tuple[bool, ...] | None = None) -> bool:
        if trained != self.trained or (self.exact is not None and self.exact != sizes):
            return False
        if not self.guards:
            return True
        env = {symbol: sizes[name] for name, symbol in self.symbols.items()}
        return all(bool(sympy_interp(PythonReferenceAnalysis, env, guard)) for guard in self.guards)


INNER = ("inductor", "aot_eager", "eager")


def trained_in(values: Sequence[Any]) -> tuple[bool, ...]:
    """Which inputs require grad. AOTAutograd decides by it what backward computes; Dynamo's guards may miss a parameter that is frozen
    or thawed in place."""
    return tuple(isinstance(value, torch.Tensor) and value.requires_grad for value in values)


def compile_bucket(
    module: torch.fx.GraphModule, inputs: Sequence[Any], sizes: Mapping[str, int], inner: str, trained: tuple[bool, ...] | None = None
) -> Bucket:
    """Compile a graph for symbolic sizes.

    Args:
        module: the graph; its placeholders correspond to `inputs`.
        inputs: per placeholder a `TensorSpec`, a real tensor (parameters, buffers: sizes fixed), the name of a symbol, or a constant.
        sizes: the current value of each symbol.
        inner: "inductor", "aot_eager" or "eager".
        trained: see `trained_in`; calls in which other inputs require grad need another form.
    """
    with LOCK:
        return _compile(selective.outline(module), inputs, sizes, inner, trained)


def _compile(
    module: torch.fx.GraphModule, inputs: Sequence[Any], sizes: Mapping[str, int], inner: str, trained: tuple[bool, ...] | None
) -> Bucket:
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
        tag = cache_tag(module)
        with tracing(TracingContext(mode)), _tagged(tag):
            call = _backend(inner, tag)(module, fakes)
    names = {name: size.node.expr if isinstance(size, torch.SymInt) else sympy.Symbol(name, integer=True) for name, size in made.items()}
    originals = {name: _original(env, name) for name in made}
    guards = [guard.expr for guard in env.guards]
    guards += [sympy.Eq(originals[name], names[name]) for name in made if originals[name] != names[name]]
    return Bucket(call, originals, guards, time.perf_counter() - started, trained)


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


def _backend(inner: str, tag: str) -> Callable[..., Any]:
    if inner == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def tagged(*args: Any, **kwargs: Any) -> Any:
        # backward may be compiled by the first backward call, long after the caller's settings are gone
        with _tagged(tag):
            return compile_fx_inner(*args, **kwargs)

    return functools.partial(compile_fx, inner_compile=tagged)


def _tagged(tag: str) -> contextlib.AbstractContextManager[Any]:
    """Puts a tag into the keys of what is cached inside."""
    config: Any = torch.compiler.config
    patched: contextlib.AbstractContextManager[Any] = config.patch(cache_key_tag=tag)
    return patched


def cache_tag(module: torch.fx.GraphModule) -> str:
    """What the keys of torch's caches must hold besides the code of a graph.

    The code names ops of this package but not what they do: that is the package's version and sources. Checkpoint tags, which decide
    what backward recomputes, are metadata that keys leave out.
    """
    order: dict[Any, int] = {}
    tags = [tuple(_stable(node.meta.get(tag), order) for tag in TAGS) for node in module.graph.nodes]
    kernels = sorted({str(node.target) for node in module.graph.nodes if str(node.target).startswith("sp_compile")})
    parts = (
        torch.compiler.config.cache_key_tag,
        getattr(sys.modules["sp_compile"], "__version__", ""),  # not imported: the package stands above this file
        _sources(),
        torch.are_deterministic_algorithms_enabled(),
        kernels,
        hashlib.sha256(repr(tags).encode()).hexdigest(),
    )
    return f"sp_compile {parts}"


def _stable(value: Any, order: dict[Any, int]) -> Any:
    """A tag's value, its number of first appearance for those that are counted up in a process."""
    return order.setdefault(value, len(order)) if isinstance(value, int) and not isinstance(value, enum.Enum) else str(value)


@functools.cache
def _sources() -> str:
    """A digest of this package: a checkout keeps its version while it changes."""
    digest = hashlib.sha256()
    root = pathlib.Path(__file__).parent
    for file in sorted(root.rglob("*.py")):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()
