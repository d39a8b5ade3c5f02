"""What the recurrent ops share: their form as torch ops, checks of their inputs, and the pieces of their reference bodies.

All values are on physical tokens with leading sizes [1, T], in depth-first preorder. Two forest tensors say who precedes whom:

    prev  int64 [T]: the token before i in its rows; a negative number -1 - s says that the token continues external state s
    end   int64 [T]: exclusive end of the subtree of i's node; k is i or one of its ancestors exactly if k <= i < end[k]

External states are rows of an optional tensor `initial` [S, ...]; without it, a token without predecessor starts from zeros. An
optional `final` int64 [F] names tokens whose states, after the token, are a second result [F, ...].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.numerics import accumulate_dtype, owned, without_autocast

Values = tuple[Tensor, ...]
# Tensors, and None for absent ones, as the schema has them.
Inputs = tuple[Any, ...]
Forward = Callable[..., Values]
Backward = Callable[[Values, Inputs, dict[str, Any]], Values]

# Relative Frobenius error of an implementation against an op in float64 (semantics.md 10). Half types: inputs and results are rounded
# once each, everything between is float32; a gradient of a parameter sums rounded gradients of many tokens.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 5e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def define(name: str, inputs: str, options: str, outputs: int, forward: Forward, backward: Backward, fake: Forward, gradients: int) -> Any:
    """Registers `sp_compile::name` and `sp_compile::name_backward` with fakes and autograd.

    Args:
        inputs: the tensor part of the schema, such as "Tensor x, Tensor? bias, Tensor prev"; the first is never absent.
        options: the keyword part, may be empty.
        outputs: number of results; all are differentiable.
        forward: `(*inputs, **options) -> outputs`, also of an op with one result.
        backward: `(gradients of the outputs, inputs, options) -> gradients` of the first `gradients` inputs and of an input `initial` or
            `halo`, in the order of the inputs, each in shape and dtype of its input; of an absent input an empty tensor [0].
        fake: as `forward`, on fake tensors: new contiguous tensors, no guards.
        gradients: see above.
    """
    names = [part.split()[-1] for part in inputs.split(",")]
    wanted = [i for i, item in enumerate(names) if i < gradients or item in ("initial", "halo")]
    keywords = f", *, {options}" if options else ""
    returns = "Tensor" if outputs == 1 else "(" + ", ".join(["Tensor"] * outputs) + ")"
    grads = ", ".join(f"Tensor grad_{i}" for i in range(outputs))

    def only(values: Values) -> Any:
        return values[0] if outputs == 1 else values

    @without_autocast
    def run(*args: Any, **kwargs: Any) -> Any:
        return only(forward(*args, **kwargs))

    @without_autocast
    def run_backward(*args: Any, **kwargs: Any) -> Values:
        return backward(args[:outputs], args[outputs:], kwargs)

    def run_fake(*args: Any, **kwargs: Any) -> Any:
        return only(fake(*args, **kwargs))

    def backward_fake(*args: Any, **kwargs: Any) -> Values:
        like = [args[outputs + i] for i in wanted]
        return tuple(args[0].new_empty(0) if x is None else x.new_empty(x.shape) for x in like)

    def setup(ctx: Any, inputs: tuple[Any, ...], output: Any, keyword_only_inputs: dict[str, Any] | None = None) -> None:
        ctx.save_for_backward(*inputs)
        ctx.options = keyword_only_inputs or {}

    def autograd(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        made = op_backward(*(owned(grad) for grad in grads), *ctx.saved_tensors, **ctx.options)
        found = dict(zip(wanted, made, strict=True))
        return tuple(found[i] if i in found and ctx.needs_input_grad[i] else None for i in range(len(names)))

    tags = (torch.Tag.needs_exact_strides,)
    op = torch.library.custom_op(f"sp_compile::{name}", run, mutates_args=(), schema=f"({inputs}{keywords}) -> {returns}", tags=tags)
    op_backward = torch.library.custom_op(
        f"sp_compile::{name}_backward",
        run_backward,
        mutates_args=(),
        schema=f"({grads}, {inputs}{keywords}) -> ({', '.join(['Tensor'] * len(wanted))})",
        tags=tags,
    )
    op.register_fake(run_fake)
    op_backward.register_fake(backward_fake)
    op.register_autograd(autograd, setup_context=setup)
    return op


def pullback(body: Forward, differentiable: Sequence[int], grads: Values, inputs: Inputs, options: dict[str, Any]) -> Values:
    """Gradients of `body(*inputs, **options)` at the inputs in these positions; for absent ones an empty tensor [0].

    Works inside a backward op, where the dispatcher has autograd switched off: `torch.func` brings its own.
    """
    present = [i for i in differentiable if inputs[i] is not None]

    def of_present(*values: Tensor) -> Values:
        full = list(inputs)
        for i, value in zip(present, values, strict=True):
            full[i] = value
        return body(*full, **options)

    vjp = torch.func.vjp(of_present, *(inputs[i] for i in present))[1]
    found = dict(zip(present, vjp(grads), strict=True))
    # A gradient may be the very tensor that came in, which an op must not return.
    return tuple(found[i].clone(memory_format=torch.contiguous_format) if i in found else grads[0].new_empty(0) for i in differentiable)


def reference_backward(body: Forward, *differentiable: int) -> Backward:
    """The backward of a reference body, for `define`."""

    def backward(grads: Values, inputs: Inputs, options: dict[str, Any]) -> Values:
        return pullback(body, differentiable, grads, inputs, options)

    return backward


def state_fake(like: Tensor, final: Tensor | None, *shape: Any) -> Tensor:
    """The fake second result of an op: [F, *shape] in accumulation dtype."""
    return like.new_empty((0 if final is None else final.shape[0], *shape), dtype=accumulate_dtype(like.dtype))


def expect(op: str, name: str, value: Tensor | None, *shapes: tuple[int, ...]) -> None:
    """Raises InvalidInput unless a present `value` is floating point and has one of `shapes`."""
    if value is not None and (tuple(value.shape) not in shapes or not value.is_floating_point()):
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise InvalidInput(f"{op}: {name} must be floating point {wanted}; got {value.dtype} {list(value.shape)}")


def check_forest(op: str, tokens: int, prev: Tensor, end: Tensor | None, states: int | None, final: Tensor | None) -> None:
    """Raises InvalidInput unless the forest tensors fit `tokens`; `states` is the number of external states, None if none is given.

    Values are read on the CPU only.
    """
    for name, value in (("prev", prev), ("end", end)):
        if value is not None and (value.shape != (tokens,) or value.dtype != torch.int64):
            raise InvalidInput(f"{op}: {name} must be int64 [{tokens}]; got {value.dtype} {list(value.shape)}")
    if final is not None and (final.dim() != 1 or final.dtype != torch.int64):
        raise InvalidInput(f"{op}: final must be int64 [F]; got {final.dtype} {list(final.shape)}")
    if prev.device.type != "cpu" or not tokens:
        return
    if bool((prev >= torch.arange(tokens)).any()):
        raise InvalidInput(f"{op}: prev must point before its token; expected a forest in depth-first preorder")
    if states is not None and int(prev.min()) < -states:
        raise InvalidInput(f"{op}: prev continues external state {-1 - int(prev.min())}, but only {states} are given")
    if final is not None and final.numel() and not 0 <= int(final.min()) <= int(final.max()) < tokens:
        raise InvalidInput(f"{op}: final must lie in [0, {tokens}); got [{int(final.min())}, {int(final.max())}]")


def check_initial(op: str, like: Tensor, initial: Tensor | None, shape: tuple[int, ...]) -> int | None:
    """Number of external states, None if `initial` is. Raises InvalidInput unless it is [S, *shape] in accumulation dtype."""
    if initial is None:
        return None
    wanted = accumulate_dtype(like.dtype)
    if tuple(initial.shape[1:]) != shape or initial.dim() != len(shape) + 1 or initial.dtype != wanted:
        sizes = ", ".join(str(size) for size in shape)
        raise InvalidInput(f"{op}: initial must be {wanted} [S, {sizes}]; got {initial.dtype} {list(initial.shape)}")
    return int(initial.shape[0])


def check_group(op: str, heads: int, groups: int) -> None:
    """Raises InvalidInput unless heads are a multiple of groups."""
    if groups == 0 or heads % groups:
        raise InvalidInput(f"{op}: expected heads to be a multiple of groups; got {heads} and {groups}")


def allow_matrix(end: Tensor) -> Tensor:
    """bool [T, T]: whether token k is token q or an ancestor of it, at [q, k]."""
    tokens = torch.arange(end.shape[0], device=end.device)
    return (tokens[None, :] <= tokens[:, None]) & (tokens[:, None] < end[None, :])


def external_state(prev: Tensor, allow: Tensor, initial: Tensor | None) -> Tensor | None:
    """[T, ...]: the external state that each token's path continues; None if there is none."""
    if initial is None or not prev.shape[0]:
        return None
    return initial[-1 - prev[allow.to(torch.int8).argmax(1)]]


def softplus(x: Tensor) -> Tensor:
    """As torch's, linear above 20, composed of functions that give a value the same bits at every place of a tensor.

    torch's own softplus, sigmoid and silu compute the last elements of a block on the CPU by other code than the rest.
    """
    return torch.where(x > 20, x, torch.log1p(x.clamp(max=20).exp()))


def sigmoid(x: Tensor) -> Tensor:
    """See `softplus`."""
    return 1 / (1 + (-x).exp())


def scan_states(decay: Tensor, term: Tensor, prev: Tensor, initial: Tensor | None) -> Tensor:
    """[T, ...]: h_t = decay_t * h_prev(t) + term_t, a token at a time."""
    states: list[Tensor] = []
    for before, a, b in zip(prev.tolist(), decay.unbind(0), term.unbind(0), strict=True):
        if before >= 0:
            states.append(a * states[before] + b)
        else:
            states.append(b if initial is None else a * initial[-1 - before] + b)
    return torch.stack(states) if states else term
