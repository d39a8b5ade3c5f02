"""The delta rule inside of chunks, between the state that enters a chunk and the one that leaves it. Formulas: README.md.

N counts pairs of chunk and head, c tokens, K and V are the sizes of the state; everything is in one dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.kernels.delta_rule.decays import Decays, decays, log_gradient
from sp_compile.kernels.delta_rule.pairs import PerHead, PerRow
from sp_compile.kernels.delta_rule.triangular import unit_lower_inverse


@dataclass(frozen=True)
class Inputs:
    """rows [N, c, 2, K], query and key of each token; v [N, c, V]; g [N, c, 1 or K]; beta [N, c, 1]. Zeros in empty slots."""

    rows: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    @property
    def q(self) -> Tensor:
        """[N, c, K]"""
        return self.rows[:, :, 0]

    @property
    def k(self) -> Tensor:
        """[N, c, K]"""
        return self.rows[:, :, 1]


@dataclass(frozen=True)
class Chunks:
    """What can be said of chunks before their entering states S [N, K, V] are known.

    Tokens write `written = writes[..., :V] + writes[..., V:] @ S`, and S leaves as `whole * S + to_end^T @ written`.

    Attributes:
        pairs: [N, c, 2, c]; [:, :, 0] holds q.k with decay, diagonal included, [:, :, 1] k.k with decay, strictly lower.
        inverse: [N, c, c] (I + beta k.k)^-1.
        writes: [N, c, V + K].
        to_end: [N, c, K] keys, decayed to the end of the chunk.
    """

    given: Inputs
    decays: Decays
    form: PerHead | PerRow
    pairs: Tensor
    inverse: Tensor
    writes: Tensor
    to_end: Tensor

    @property
    def products(self) -> Tensor:
        """[N, c, c] q.k with decay, diagonal included."""
        return self.pairs[:, :, 0]

    @property
    def from_start(self) -> Tensor:
        """[N, c, K] queries, decayed from the start of the chunk."""
        return self.given.q * self.decays.start


def chunks_of(given: Inputs) -> Chunks:
    """The part of the forward pass that is parallel over chunks."""
    rows, k, beta, width = given.rows, given.k, given.beta, given.v.shape[2]
    decay = decays(given.g)
    form = PerHead(decay) if given.g.shape[2] == 1 else PerRow(decay)
    pairs = form.products(rows)
    inverse = unit_lower_inverse(pairs[:, :, 1] * beta)
    pairs[:, :, 0].diagonal(dim1=1, dim2=2).copy_((given.q * k).sum(2))
    wanted = torch.empty((*k.shape[:2], width + k.shape[2]), dtype=k.dtype, device=k.device)
    torch.mul(given.v, beta, out=wanted[..., :width])
    torch.mul(k * decay.start, -beta, out=wanted[..., width:])
    return Chunks(given, decay, form, pairs, inverse, torch.bmm(inverse, wanted), k * decay.stop)


def step(writes: Tensor, to_end: Tensor, whole: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """`(written [N, c, V], leaving state)` for the entering `state`; the other three as in `Chunks`, `whole` [N, 1 or K, 1]."""
    width = state.shape[2]
    written = torch.baddbmm(writes[..., :width], writes[..., width:], state)
    return written, torch.baddbmm(state * whole, to_end.mT, written)


def step_back(writes: Tensor, to_end: Tensor, whole: Tensor, outer: tuple[Tensor, Tensor], leaving: Tensor) -> tuple[Tensor, Tensor]:
    """`(gradient of what is written, of the entering state)` for that of the leaving state; `outer` are their parts from the outputs."""
    d_written = torch.baddbmm(outer[0], to_end, leaving)
    d_state = torch.addcmul(outer[1], leaving, whole)
    return d_written, torch.baddbmm(d_state, writes[..., leaving.shape[2] :].mT, d_written)


def read_out(products: Tensor, from_start: Tensor, state: Tensor, written: Tensor, scale: float) -> Tensor:
    """Outputs [N, c, V]."""
    return torch.baddbmm(torch.bmm(from_start, state), products, written, beta=scale, alpha=scale)


def read_out_back(products: Tensor, from_start: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of `written` and `state` in `read_out` for `grad` [N, c, V] of the outputs, times the scale."""
    return torch.bmm(products.mT, grad), torch.bmm(from_start.mT, grad)


def gradients(
    made: Chunks, state: Tensor, written: Tensor, grad: Tensor, d_written: Tensor, leaving: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of rows, v, g and beta.

    Args:
        state: [N, K, V] entering states.
        written: [N, c, V].
        grad: [N, c, V] gradient of the outputs, times the scale.
        d_written: [N, c, V] gradient of `written`.
        leaving: [N, K, V] gradient of the leaving states.
    """
    given, decay = made.given, made.decays
    rows, k, beta, width = given.rows, given.k, given.beta, given.v.shape[2]
    chunks, size = grad.shape[:2]
    d_wanted = torch.bmm(made.inverse.mT, d_written)
    d_v = d_wanted * beta
    surprise = torch.baddbmm(given.v, k * decay.start, state, alpha=-1).baddbmm_(made.pairs[:, :, 1], written, alpha=-1)
    d_beta = d_wanted.mul_(surprise).sum(2, keepdim=True)
    both = torch.stack([grad, -d_v], 2).view(chunks, 2 * size, width)
    d_pairs = torch.bmm(both, written.mT).view(chunks, size, 2, size)
    d_same = d_pairs[:, :, 0].diagonal(dim1=1, dim2=2).clone()[..., None]
    d_rows, d_k, d_log = made.form.pullback(rows, made.pairs, d_pairs)
    across = torch.bmm(both, state.mT).view(rows.shape).mul_(decay.start[:, :, None])
    d_end = torch.bmm(written, leaving.mT).mul_(decay.stop)
    # The log decay from before the chunk to token i multiplies what i reads and divides what others read of i.
    passed = made.form.reduced(k * d_end)
    d_log += made.form.reduced((rows * across).sum(2)) - passed
    d_log[:, -1] += passed.sum(1) + decay.whole * made.form.reduced((state * leaving).sum(2))
    d_rows += across
    d_rows[:, :, 1] += d_k.add_(d_end).addcmul_(given.q, d_same)
    d_rows[:, :, 0].addcmul_(k, d_same)
    return d_rows, d_v, log_gradient(d_log), d_beta
