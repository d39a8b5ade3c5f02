"""What ops with a matrix state per head, `S [K, V]`, have in common: the recurrence along a forest, its gradient, shapes and checks.

Token i continues the state of `prev[i]`, or an external one, see `recurrent`:

    S' = exp(g_i) S_prev                                 g_i one number per head, or one per head and row of S
    S_i = S' + k_i w_i^T                                 w_i = v_i, or beta_i (v_i - S'^T k_i) for a delta rule
    o_i = scale * S_i^T q_i

The recurrence is stepped token by token. Its sums have one fixed size, so what a token gets depends on its ancestors only, in every
bit; the form with one triangular system over all pairs of tokens overflows for decays per row and makes NaN of g = -inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput
from sp_compile.ops.recurrent import check_forest, check_group, check_initial, state_fake

L2NORM_EPS = 1e-6


def l2norm(x: Tensor) -> Tensor:
    """`x * rsqrt(sum(x^2) + 1e-6)` over the last dim, as flash-linear-attention and transformers normalise queries and keys."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)


def l2norm_backward(x: Tensor, grad: Tensor) -> Tensor:
    """Gradient of x for the gradient of `l2norm(x)`."""
    inverse = torch.rsqrt((x * x).sum(-1, keepdim=True) + L2NORM_EPS)
    unit = x * inverse
    return inverse * (grad - unit * (unit * grad).sum(-1, keepdim=True))


@dataclass(frozen=True)
class Recurrence:
    """The recurrence above on values of one dtype.

    Attributes:
        q, k: [1, T, H, K].
        v: [1, T, H, V].
        g: log decay [1, T, H, 1 or K]; None: no decay.
        beta: [1, T, H]; None: no delta rule.
        prev: T numbers.
        initial: [S, H, K, V].
        final: F tokens.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor | None
    beta: Tensor | None
    prev: list[int]
    initial: Tensor | None
    final: list[int]
    scale: float

    def decayed(self, states: list[Tensor], i: int) -> Tensor:
        """S' [H, K, V] of token i."""
        before = self.prev[i]
        if before >= 0:
            state = states[before]
        elif self.initial is not None:
            state = self.initial[-1 - before]
        else:
            return self.v.new_zeros((self.k.shape[2], self.k.shape[3], self.v.shape[3]))
        return state if self.g is None else self.g[0, i, :, :, None].exp() * state

    def surprise(self, decayed: Tensor, i: int) -> Tensor:
        """[H, V] what is written at strength one: v, or what of it the state does not hold yet."""
        value = self.v[0, i]
        return value if self.beta is None else value - (decayed * self.k[0, i, :, :, None]).sum(1)

    def strength(self, i: int) -> Tensor | float:
        """[H, 1] factor of what is written."""
        return 1.0 if self.beta is None else self.beta[0, i, :, None]

    def states(self) -> list[Tensor]:
        """S_i [H, K, V] of every token."""
        states: list[Tensor] = []
        for i in range(len(self.prev)):
            decayed = self.decayed(states, i)
            write = self.strength(i) * self.surprise(decayed, i)
            states.append(decayed + self.k[0, i, :, :, None] * write[:, None, :])
        return states

    def forward(self) -> tuple[Tensor, Tensor]:
        """`(out [1, T, H, V], states [F, H, K, V])`."""
        states = self.states()
        out = torch.zeros_like(self.v, memory_format=torch.contiguous_format)
        for i, state in enumerate(states):
            out[0, i] = self.scale * (state * self.q[0, i, :, :, None]).sum(1)
        shape = (0, self.k.shape[2], self.k.shape[3], self.v.shape[3])
        return out, torch.stack([states[i] for i in self.final]) if self.final else self.v.new_zeros(shape)

    def backward(self, grad: Tensor, grad_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of q, k, v, g, beta and initial for those of the outputs; None for what is absent.

        The adjoint of a state is summed in a fixed order: final states, then children from the last to the first, then its own output.
        """
        states = self.states()
        d_q, d_k, d_v = (torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (self.q, self.k, self.v))
        d_g, d_beta, d_initial = (None if x is None else torch.zeros_like(x) for x in (self.g, self.beta, self.initial))
        adjoint: list[Tensor | float] = [0.0] * len(states)
        for i, given in zip(self.final, grad_states, strict=True):
            adjoint[i] = adjoint[i] + given
        for i in reversed(range(len(states))):
            q, k, d_out = self.q[0, i, :, :, None], self.k[0, i, :, :, None], self.scale * grad[0, i, :, None, :]
            decayed = self.decayed(states, i)
            surprise, strength = self.surprise(decayed, i), self.strength(i)
            d_state = adjoint[i] + q * d_out
            d_q[0, i] = (states[i] * d_out).sum(2)
            d_k[0, i] = (d_state * (strength * surprise)[:, None, :]).sum(2)
            d_write = (d_state * k).sum(1)
            d_v[0, i] = strength * d_write
            if d_beta is not None:
                d_beta[0, i] = (d_write * surprise).sum(1)
                d_k[0, i] -= (decayed * d_v[0, i, :, None, :]).sum(2)
                d_state = d_state - k * d_v[0, i, :, None, :]
            if self.g is not None and d_g is not None:
                d_g[0, i] = (d_state * decayed).sum(2).sum_to_size(d_g.shape[2:])
                d_state = self.g[0, i, :, :, None].exp() * d_state
            before = self.prev[i]
            if before >= 0:
                adjoint[before] = adjoint[before] + d_state
            elif d_initial is not None:
                d_initial[-1 - before] += d_state
        return d_q, d_k, d_v, d_g, d_beta, d_initial


def numbers(tokens: Tensor | None) -> list[int]:
    """Token numbers on the host; none for None."""
    return [] if tokens is None else [int(i) for i in tokens.tolist()]


def rounded(gradients: Sequence[Tensor | None], inputs: Sequence[Tensor | None], like: Tensor) -> tuple[Tensor, ...]:
    """Contiguous gradients in the dtypes of their inputs; an empty tensor [0] for an absent input."""
    return tuple(
        like.new_empty(0) if x is None or gradient is None else gradient.to(x.dtype).contiguous()
        for gradient, x in zip(gradients, inputs, strict=True)
    )


def fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Outputs of every op with a matrix state, `final` being the ninth input."""
    return v.new_empty(v.shape), state_fake(v, rest[5], v.shape[2], k.shape[3], v.shape[3])


def check_inputs(
    op: str, q: Tensor, k: Tensor, v: Tensor, prev: Tensor, end: Tensor, initial: Tensor | None, final: Tensor | None, chunk: int,
    *, grouped: bool = False,
) -> None:  # fmt: skip
    """Raises InvalidInput for shapes, dtypes and numbers outside the contract. For real tensors only: it would guard on symbolic sizes.

    Args:
        op: name for the text.
        grouped: whether q and k may have fewer heads than v.
    """
    shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
    if q.dim() != 4 or q.shape != k.shape or v.dim() != 4 or q.shape[0] != 1 or v.shape[:2] != q.shape[:2]:
        raise InvalidInput(f"{op}: expected q and k [1, T, H, K] and v [1, T, H, V]; got {shapes}")
    tokens, heads = v.shape[1:3]
    if grouped:
        check_group(op, heads, q.shape[2])
    elif heads != q.shape[2]:
        raise InvalidInput(f"{op}: expected as many heads of v as of q and k; got {shapes}")
    if not q.dtype == k.dtype == v.dtype or not q.is_floating_point():
        raise InvalidInput(f"{op}: q, k and v must have one floating-point dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if chunk < 1:
        raise InvalidInput(f"{op}: chunk must be positive; got {chunk}")
    check_forest(op, tokens, prev, end, check_initial(op, q, initial, (heads, q.shape[3], v.shape[3])), final)
