"""Linear attention inside of chunks. Formulas: README.md.

N counts pairs of chunk and head, c tokens, K and V are the sizes of the state; everything is in one dtype. States S [N, K, V] enter a
chunk and leave it as `whole * S + own`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sp_compile.kernels.delta_rule.decays import Decays, decays, log_gradient
from sp_compile.kernels.delta_rule.pairs import decay_matrix, log_gradient_of


@dataclass(frozen=True)
class Chunks:
    """q, k [N, c, K] and v [N, c, V], zeros in empty slots, and the decays of their slots [N, c, 1].

    Attributes:
        products: [N, c, c] q.k with decay, diagonal included.
        matrix: [N, c, c] decays, without the diagonal.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    decays: Decays
    matrix: Tensor
    products: Tensor

    def own(self) -> Tensor:
        """[N, K, V] what the chunk's tokens add to the state."""
        return torch.bmm((self.k * self.decays.stop).mT, self.v)

    def own_back(self, leaving: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients of `k * stop` and of v for that of the leaving state."""
        return torch.bmm(self.v, leaving.mT), torch.bmm(self.k * self.decays.stop, leaving)

    def read_out(self, state: Tensor, scale: float) -> Tensor:
        """Outputs [N, c, V]."""
        return torch.baddbmm(torch.bmm(self.q * self.decays.start, state), self.products, self.v, beta=scale, alpha=scale)

    def state_back(self, grad: Tensor) -> Tensor:
        """[N, K, V] gradient of the entering state through the outputs, `grad` being theirs times the scale."""
        return torch.bmm((self.q * self.decays.start).mT, grad)


def chunks_of(q: Tensor, k: Tensor, v: Tensor, g: Tensor) -> Chunks:
    """For log decays g [N, c, 1]."""
    decay = decays(g)
    matrix = decay_matrix(decay)
    products = torch.bmm(q, k.mT).mul_(matrix)
    products.diagonal(dim1=1, dim2=2).copy_((q * k).sum(2))
    return Chunks(q, k, v, decay, matrix, products)


def gradients(made: Chunks, state: Tensor, grad: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and g.

    Args:
        state: [N, K, V] entering states.
        grad: [N, c, V] gradient of the outputs, times the scale.
        leaving: [N, K, V] gradient of the leaving states.
    """
    q, k, v, decay = made.q, made.k, made.v, made.decays
    d_end, d_v = made.own_back(leaving)
    d_v.baddbmm_(made.products.mT, grad)
    d_pairs = torch.bmm(grad, v.mT)
    d_same = d_pairs.diagonal(dim1=1, dim2=2).clone()[..., None]
    weights = d_pairs * made.products
    weights.diagonal(dim1=1, dim2=2).zero_()
    d_log = log_gradient_of(weights, weights)
    d_pairs.mul_(made.matrix)
    across = torch.bmm(grad, state.mT).mul_(decay.start)
    d_end.mul_(decay.stop)
    # The log decay from before the chunk to token i multiplies what i reads and divides what others read of i.
    passed = (k * d_end).sum(2, keepdim=True, dtype=torch.float64)
    d_log += (q * across).sum(2, keepdim=True, dtype=torch.float64) - passed
    d_log[:, -1] += passed.sum(1) + decay.whole * (state * leaving).sum((1, 2), dtype=torch.float64)[:, None]
    d_q = torch.bmm(d_pairs, k).add_(across).addcmul_(k, d_same)
    d_k = torch.bmm(d_pairs.mT, q).add_(d_end).addcmul_(q, d_same)
    return d_q, d_k, d_v, log_gradient(d_log)
