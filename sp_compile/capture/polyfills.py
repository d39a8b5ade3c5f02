"""The machinery of capture: replaces a library function while Dynamo traces for this backend, and only then.

`torch.compiler.substitute_in_graph` is keyed by the identity of the function, acts only while Dynamo traces, and leaves eager calls alone.
It is global and permanent, so a polyfill first asks `ours()`, which Dynamo evaluates once per trace to a constant: under any other
backend the original is inlined and nothing else reaches the graph.

Rules for a polyfill, each of which was learned from a silent dense run:
* it never raises: Dynamo would break the graph and run the original densely without a word. It puts a `refusal_site` on the result;
* it binds arguments by the original's own parameters, since names drift between versions, and refuses what it does not know;
* it calls a clone of the original: calling the original would recurse into the polyfill.
"""

from __future__ import annotations

import inspect
import logging
import threading
import types
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

import sp_compile.ops.sites  # noqa: F401  (registers the ops that polyfills call)

log = logging.getLogger(__name__)

Function = Callable[..., Any]
Scan = Callable[[], None]

_LOCK = threading.RLock()
_BACKENDS: list[Function] = []
# Dynamo keys by id() alone, so an original that were collected could hand its id, and its polyfill, to a stranger.
_REGISTERED: dict[int, types.FunctionType] = {}
_DECLINED: dict[int, types.FunctionType] = {}
_SCANS: list[Scan] = []
_TRACE = threading.local()
# How many functions and methods have been replaced so far.
_REPLACED = [0]


def set_backend(backend: Function) -> Function:
    """Adds `backend` to the compile functions that polyfills act for, and returns it, so it can be used as a decorator."""
    with _LOCK:
        if all(known is not backend for known in _BACKENDS):
            _BACKENDS.append(backend)
    return backend


def unset_backend(backend: Function) -> None:
    """Removes what `set_backend` added."""
    with _LOCK:
        _BACKENDS[:] = [known for known in _BACKENDS if known is not backend]


def _wrapped(function: Any) -> Iterator[Any]:
    """The callables that `function` is known to call, by the wrappers PyTorch itself puts around a backend."""
    for attribute in ("_torchdynamo_orig_backend", "compiler_fn", "backend_compile_fn", "__wrapped__"):
        inner = inspect.getattr_static(function, attribute, None)
        if inner is not None:
            yield getattr(function, attribute, None)
    if isinstance(function, partial):
        yield function.func
    if isinstance(function, types.MethodType):
        yield function.__self__
        yield function.__func__


def is_ours(compiler: Any) -> bool:
    """Whether `compiler` is, or wraps, one of the backends given to `set_backend`. Looks through WrapBackendDebug, the torch.compile
    wrapper, functools.partial, functools.wraps and the DDP optimizer. Never raises."""
    seen: list[Any] = []
    pending = [compiler]
    while pending and len(seen) < 64:
        candidate = pending.pop()
        if candidate is None or any(candidate is old for old in seen):
            continue
        seen.append(candidate)
        if any(candidate is known for known in _BACKENDS):
            return True
        pending.extend(_wrapped(candidate))
    return False


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def ours() -> bool:
    """Whether the trace in progress is made for one of our backends. A constant of the trace; False outside of a trace."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return is_ours(InstructionTranslator.current_tx().output.compiler_fn)
    except Exception:
        return False


def constant(number: Any) -> Any:
    """`number` as a Python constant of the trace, with a guard. Under dynamic=True, Dynamo makes numbers found on objects symbolic; it
    makes them concrete again where they are dictionary keys (arithmetic first, since a number not yet looked at is left alone)."""
    if number is None or isinstance(number, bool):
        return number
    for key in {number * 1: None}:
        return key


def clone(function: types.FunctionType) -> types.FunctionType:
    """A second function object with the same code, globals, defaults and closure."""
    twin = types.FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    twin.__kwdefaults__ = function.__kwdefaults__
    twin.__module__ = function.__module__
    twin.__qualname__ = function.__qualname__
    return twin


class Parameters:
    """The parameters of an original function, as plain tuples that Dynamo can walk.

    Attributes:
        names: of positional and keyword parameters, in order.
        defaults: of those parameters that have one.
        aliases: old keyword -> new keyword, where a decorator renames.
    """

    def __init__(self, function: types.FunctionType, aliases: dict[str, str] | None = None) -> None:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.names = tuple(p.name for p in named)
        self.defaults = {p.name: p.default for p in named if p.default is not p.empty}
        self.aliases = {old: new for old, new in (aliases or {}).items() if new in self.names and old not in self.names}


def bind(names: tuple[str, ...], defaults: dict[str, Any], aliases: dict[str, str], args: Any, kwargs: Any) -> dict[str, Any]:
    """Arguments by name: `defaults`, overlaid by the positional and the keyword arguments. Written for Dynamo to trace."""
    bound = dict(defaults)
    bound.update(zip(names, args))  # noqa: B905  (too many arguments are the original's error to raise)
    for name, value in kwargs.items():
        bound[aliases.get(name, name)] = value
    return bound


def tell(reason: str) -> None:
    """Keeps why a call is refused that may break the graph: its marker is lost then, and what runs behind it knows no reason."""
    _told().setdefault(reason)


def take_told() -> tuple[str, ...]:
    """What was told in the trace in progress and not taken yet."""
    reasons = tuple(_told())
    _told().clear()
    return reasons


def _told() -> dict[str, None]:
    if not hasattr(_TRACE, "told"):
        _TRACE.told = {}
    found: dict[str, None] = _TRACE.told
    return found


def refuse(dense: Any, reason: str) -> Any:
    """`dense` with a refusal marker, if it is a tensor or a tuple that starts with one; else unchanged. Written for Dynamo to trace."""
    return _mark(dense, torch.ops.sp_compile.refusal_site, reason)


def on_rows(dense: Any, reason: str) -> Any:
    """As `refuse`, for a call that may run on rows inside of a shared graph, with a warning: only `strict` refuses it."""
    return _mark(dense, torch.ops.sp_compile.rows_site, reason)


def _mark(dense: Any, site: Any, reason: str) -> Any:
    if isinstance(dense, torch.Tensor):
        return site(dense, reason)
    if isinstance(dense, tuple) and len(dense) > 0 and isinstance(dense[0], torch.Tensor):
        return (site(dense[0], reason), *dense[1:])
    return dense


def substitute(
    original: Any, build: Callable[[types.FunctionType, types.FunctionType], Function | None], declined: str | None = None
) -> bool:
    """Registers a polyfill for `original`, once.

    Args:
        original: the library's function. Anything but a plain Python function is left alone.
        build: called with the original and a clone of it; returns the polyfill that is used under our backends, or None to leave the
            function alone.
        declined: what the user is told where a function that `build` leaves alone runs on rows; None: nothing.

    Returns:
        Whether `original` has a polyfill of ours now. Never raises; a function that someone else substituted is left to them.
    """
    if not isinstance(original, types.FunctionType):
        return False
    with _LOCK:
        if id(original) in _REGISTERED or id(original) in _DECLINED:
            return id(original) in _REGISTERED
        try:
            raw = clone(original)
            polyfill = build(original, raw)
            if polyfill is None and declined is not None:
                polyfill = _left_alone(raw, f"{original.__module__}.{original.__qualname__} {declined}")
            if polyfill is None:
                _DECLINED[id(original)] = original
                return False

            def replacement(*args: Any, **kwargs: Any) -> Any:
                if ours():
                    return polyfill(*args, **kwargs)
                return raw(*args, **kwargs)

            torch.compiler.substitute_in_graph(original, skip_signature_check=True)(replacement)
        except Exception:
            log.debug("no polyfill for %s.%s", original.__module__, original.__qualname__, exc_info=True)
            _DECLINED[id(original)] = original
            return False
        _REGISTERED[id(original)] = original
        count_replaced()
        return True


def _left_alone(raw: Function, reason: str) -> Function:
    def marked(*args: Any, **kwargs: Any) -> Any:
        return on_rows(raw(*args, **kwargs), reason)

    return marked


def count_replaced() -> None:
    """Says that one more function or method was replaced, so that graphs captured before are worth a retrace."""
    _REPLACED[0] += 1


def is_substituted(function: object) -> bool:
    """Whether `function` has a polyfill of ours."""
    return _REGISTERED.get(id(function)) is function


def add_scan(scan: Scan) -> Scan:
    """Adds a function that looks through `sys.modules` for functions to substitute. It runs at `install` and before every trace."""
    with _LOCK:
        if scan not in _SCANS:
            _SCANS.append(scan)
    return scan


def rescan(_: object = None) -> None:
    """Runs every scan. Never raises: it is called before the traces of other backends too."""
    for scan in tuple(_SCANS):
        try:
            with _LOCK:
                scan()
        except Exception:  # noqa: PERF203
            log.debug("scan %s failed", getattr(scan, "__qualname__", scan), exc_info=True)


def install() -> bool:
    """Scans now, and before every later trace, so that model code imported meanwhile is covered. Any number of calls is like one.

    A backend calls it when it is imported and again whenever it is given a graph, since `torch._dynamo.reset()` forgets callbacks.

    Returns:
        Whether anything new was replaced. If so inside of a backend, the graph it was given may lack markers and is worth a retrace.
    """
    handler = torch._dynamo.callback.callback_handler
    with _LOCK:
        before = _REPLACED[0]
        if rescan not in handler.start_callbacks:
            handler.register_start_callback(rescan)
        rescan()
        return _REPLACED[0] > before
