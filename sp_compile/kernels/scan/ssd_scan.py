"""`sp_compile::ssd_scan_chunked`: the state space dual form inside of chunks, states passed along the tree of chunks. See README.md.

Inside of this file states are [C, G, N, H/G * P]: the heads of a group share B and C, so that each product with them is one matrix
product per group. Token values of a block are [n, l, ...], those of heads [n, H, l, ...].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_compile.kernels.scan.chunks import (
    SHORTEST,
    Block,
    Gradient,
    Plan,
    ascend,
    descend,
    final_gradients,
    look,
    make_plan,
    running_sum,
    write,
)
from sp_compile.ops import ssd_scan
from sp_compile.ops.numerics import accumulate_dtype
from sp_compile.ops.recurrent import Inputs, Values, define, sigmoid

INPUTS = ssd_scan.INPUTS + ", Tensor chunks"


@dataclass(frozen=True)
class Scan:
    """The inputs without their leading 1, and what follows from them per token: step sizes d [T, H] and log decays [T, H] in float64."""

    x: Tensor
    B: Tensor
    C: Tensor
    d: Tensor
    log_decay: Tensor
    plan: Plan
    dtype: torch.dtype

    @property
    def groups(self) -> int:
        return self.B.shape[1]

    def state(self) -> Tensor:
        """Uninitialised states of all chunks."""
        _, heads, dim = self.x.shape
        return self.d.new_empty((self.plan.chunks, self.groups, self.B.shape[2], heads // self.groups * dim))

    def by_head(self, per_head: Tensor) -> Tensor:
        """[n, H] -> what multiplies states [n, G, N, H/G * P]."""
        heads, dim = self.x.shape[1:]
        return per_head.repeat_interleave(dim, 1).view(len(per_head), self.groups, 1, heads // self.groups * dim)


@dataclass(frozen=True)
class Part:
    """One block, read: steps d [n, l, H], x times d [n, l, H, P], B and C [n, G, l, N], the running sum of log decays [n, l, H]."""

    d: Tensor
    x: Tensor
    xd: Tensor
    B: Tensor
    C: Tensor
    cum: Tensor

    def grouped(self, values: Tensor) -> Tensor:
        """[n, l, H, P] -> [n, G, l, H/G * P]."""
        n, length = values.shape[:2]
        return values.reshape(n, length, self.B.shape[1], -1).transpose(1, 2)

    def ungrouped(self, values: Tensor) -> Tensor:
        """Inverse of `grouped`."""
        return values.transpose(1, 2).reshape(self.x.shape)

    @property
    def since_start(self) -> Tensor:
        """[n, l, H, 1]: decay from the entering state to each token."""
        return self.cum.exp().to(self.x.dtype)[..., None]

    @property
    def until_end(self) -> Tensor:
        """[n, l, H, 1]: decay from each token to the leaving state."""
        return (self.cum[:, -1:] - self.cum).exp().to(self.x.dtype)[..., None]


def prepare(inputs: Inputs, dt_softplus: bool, dt_min: float, dt_max: float) -> Scan:
    x, dt, A, B, C, _, dt_bias, _, _, _, final, chunks = inputs
    dtype, heads = accumulate_dtype(x.dtype), x.shape[2]
    d = ssd_scan.step_sizes(dt[0].to(dtype), dt_bias, dt_softplus, dt_min, dt_max)
    shortest = chunks.shape[1] - 1 if dtype == torch.float64 else SHORTEST
    plan = make_plan(chunks, x.shape[1], final, lambda length: heads * length * length, shortest)
    return Scan(x[0], B[0], C[0], d, d.double() * A.double(), plan, dtype)


def load(scan: Scan) -> list[tuple[Block, Part]]:
    """Every block, read."""
    return [(block, _part(scan, block)) for block in scan.plan.blocks]


def _part(scan: Scan, block: Block) -> Part:
    d, x = look(scan.d, block), look(scan.x, block).to(scan.dtype)
    B, C = (look(value, block).to(scan.dtype).transpose(1, 2) for value in (scan.B, scan.C))
    return Part(d, x, x * d[..., None], B, C, running_sum(look(scan.log_decay, block)))


def scores(part: Part) -> tuple[Tensor, Tensor]:
    """C_q . B_k [n, G, l, l], zero above the diagonal, and exp(cum_q - cum_k) [n, H, l, l], one above the diagonal."""
    cum = part.cum.transpose(1, 2).contiguous()
    log = differences(cum) if part.x.dtype == torch.float32 else cum[..., :, None] - cum[..., None, :]
    # Above the diagonal stand the logs of growth: their exponentials could overflow, and zero times infinity is no zero.
    decay = log.tril_().exp_()
    return torch.matmul(part.C, part.B.mT).tril_(), decay


def differences(sums: Tensor) -> Tensor:
    """float32 [..., l, l] of `sums[q] - sums[k]` for float64 [..., l], to the last bits, by passes over float32 alone."""
    high = sums.float()
    low = (sums - high).float()
    return (high[..., :, None] - high[..., None, :]).add_(low[..., :, None]).sub_(low[..., None, :])


def spread(per_group: Tensor, per_head: Tensor) -> Tensor:
    """[n, G, l, l] times [n, H, l, l], every head with its group's; a view of heads by group [n, G, H/G, l, l] of the latter is used."""
    n, groups, length, _ = per_group.shape
    return (per_head.view(n, groups, -1, length, length) * per_group[:, :, None]).view(per_head.shape)


def states(scan: Scan, parts: list[tuple[Block, Part]], initial: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """What enters and leaves each chunk, [C, G, N, H/G * P], and the decay across it [C, H]."""
    leaving = scan.state()
    across = scan.d.new_empty((scan.plan.chunks, scan.d.shape[1]))
    for block, part in parts:
        leaving.index_copy_(0, block.chunks, torch.matmul(part.B.mT, part.grouped(part.xd * part.until_end)))
        across.index_copy_(0, block.chunks, part.cum[:, -1].exp().to(scan.dtype))
    factor = scan.by_head(across)

    def step(span: slice, entering: Tensor) -> Tensor:
        return leaving[span].add_(entering * factor[span])

    return descend(scan.plan, leaving, _inward(initial, scan), step), leaving, across


def _inward(values: Tensor | None, scan: Scan) -> Tensor | None:
    """[S, H, P, N] -> [S, G, N, H/G * P]."""
    if values is None:
        return None
    rows, heads, dim, size = values.shape
    return values.reshape(rows, scan.groups, heads // scan.groups * dim, size).transpose(2, 3).contiguous()


def _outward(values: Tensor, scan: Scan) -> Tensor:
    """Inverse of `_inward`."""
    return values.transpose(2, 3).reshape(len(values), *scan.x.shape[1:], scan.B.shape[2]).contiguous()


def _skip(D: Tensor, dtype: torch.dtype) -> Tensor:
    """D as [H, 1] or [H, P]."""
    return D.to(dtype) if D.dim() == 2 else D.to(dtype)[:, None]


def forward(*inputs: Any, dt_softplus: bool, dt_min: float, dt_max: float, chunk: int = 64) -> Values:
    ssd_scan.check_inputs(*inputs[:-1])
    scan = prepare(inputs, dt_softplus, dt_min, dt_max)
    D, initial = inputs[5], inputs[9]
    parts = load(scan)
    entering, leaving, _ = states(scan, parts, initial)
    out = torch.empty_like(scan.x, memory_format=torch.contiguous_format)
    for block, part in parts:
        before = torch.matmul(part.C, entering.index_select(0, block.chunks))
        y = part.ungrouped(before) * part.since_start
        y += torch.matmul(spread(*scores(part)), part.xd.transpose(1, 2)).transpose(1, 2)
        if D is not None:
            y += _skip(D, scan.dtype) * part.x
        write(out, block, y)
    final = leaving[:0] if scan.plan.final is None else leaving[scan.plan.final]
    return out[None], _outward(final, scan)


def backward(grads: Values, inputs: Inputs, options: dict[str, Any]) -> Values:
    dt_softplus, dt_min, dt_max = (options[name] for name in ("dt_softplus", "dt_min", "dt_max"))
    scan = prepare(inputs, dt_softplus, dt_min, dt_max)
    x, dt, A, B, C, D, dt_bias, _, _, initial = inputs[:10]
    grad = grads[0][0]
    parts = load(scan)
    entering, leaving, across = states(scan, parts, initial)
    direct = scan.state()
    for block, part in parts:
        d_y = _read_owned(grad, block).to(scan.dtype)
        direct.index_copy_(0, block.chunks, torch.matmul(part.C.mT, part.grouped(d_y * part.since_start)))
    factor = scan.by_head(across)

    def step(span: slice, adjoint: Tensor) -> Tensor:
        return direct[span].add_(adjoint * factor[span])

    inward = _inward(grads[1].to(scan.dtype), scan)
    assert inward is not None
    adjoint = final_gradients(scan.plan, leaving, inward)
    d_initial = ascend(scan.plan, adjoint, _inward(initial, scan), step)
    d_x, d_d, d_log, d_B, d_C = _tokens(scan, parts, grad, entering, adjoint, across)
    d_d += d_log * A.to(scan.dtype)
    d_A = (d_log * scan.d).sum(0)
    d_D = x.new_empty(0)
    if D is not None:
        grad_ = grad.to(scan.dtype)
        d_x += grad_ * _skip(D, scan.dtype)
        d_D = (grad_ * scan.x.to(scan.dtype)).sum(0)
        d_D = (d_D if D.dim() == 2 else d_D.sum(-1)).to(D.dtype)
    d_dt = _through_steps(d_d, dt[0].to(scan.dtype), dt_bias, dt_softplus, dt_min, dt_max)
    d_bias = x.new_empty(0) if dt_bias is None else d_dt.sum(0).to(dt_bias.dtype)
    tokens = (value[None].to(like.dtype) for value, like in ((d_x, x), (d_dt, dt), (d_B, B), (d_C, C)))
    d_x, d_dt, d_B, d_C = tokens
    return d_x, d_dt, d_A.to(A.dtype), d_B, d_C, d_D, d_bias, x.new_empty(0) if d_initial is None else _outward(d_initial, scan)


def _tokens(scan: Scan, parts: list[tuple[Block, Part]], grad: Tensor, entering: Tensor, adjoint: Tensor, across: Tensor) -> Values:
    """Gradients of x [T, H, P], d [T, H] (as a factor of x only), the log decay [T, H], B and C [T, G, N]."""
    d_x, d_d, d_log, d_B, d_C = (Gradient(scan.plan, like, scan.dtype) for like in (scan.x, scan.d, scan.d, scan.B, scan.C))
    for block, part in parts:
        d_y = _read_owned(grad, block).to(scan.dtype)
        before, after = (value.index_select(0, block.chunks) for value in (entering, adjoint))
        d_y_before, x_after = part.grouped(d_y * part.since_start), part.grouped(part.xd * part.until_end)
        products, decay = scores(part)
        d_y_heads = d_y.transpose(1, 2)
        weights = spread(products, decay)
        d_weights = torch.matmul(d_y_heads, part.xd.permute(0, 2, 3, 1))
        d_xd = part.ungrouped(torch.matmul(part.B, after)) * part.until_end
        passed = (d_xd * part.xd).sum(-1)
        d_xd += torch.matmul(weights.mT, d_y_heads).transpose(1, 2)
        # The straddling pairs k < t <= q of each t; a pair (q, q) has no decay and would only add rounding.
        weights *= d_weights
        weights.diagonal(dim1=-2, dim2=-1).zero_()
        d_weights *= decay
        d_products = d_weights.unflatten(1, (scan.groups, -1)).sum(2).tril_()
        d_C.add(block, (torch.matmul(d_products, part.B) + torch.matmul(d_y_before, before.mT)).transpose(1, 2))
        d_B.add(block, (torch.matmul(d_products.mT, part.C) + torch.matmul(x_after, after.mT)).transpose(1, 2))
        received = (part.ungrouped(torch.matmul(part.C, before)) * part.since_start * d_y).sum(-1)
        whole = (before * after).unflatten(-1, (-1, scan.x.shape[2])).sum((2, 4)).flatten(1) * across.index_select(0, block.chunks)
        within = (weights.sum(-1, dtype=torch.float64) - weights.sum(-2, dtype=torch.float64)).transpose(1, 2)
        log = running_sum((within + received).flip(1)).flip(1) + whole[:, None]
        log[:, 1:] += running_sum(passed.double())[:, :-1]
        d_log.add(block, log)
        d_d.add(block, (d_xd * part.x).sum(-1))
        d_x.add(block, d_xd * part.d[..., None])
    return tuple(part.total() for part in (d_x, d_d, d_log, d_B, d_C))


def _read_owned(grad: Tensor, block: Block) -> Tensor:
    """What `read` gives, with zeros where a slot is a copy: nothing was written from there."""
    values = look(grad, block)
    if block.copied is not None:
        values.view(len(block.tokens), *grad.shape[1:]).index_fill_(0, block.copied, 0)
    return values


def _through_steps(d_d: Tensor, dt: Tensor, bias: Tensor | None, dt_softplus: bool, dt_min: float, dt_max: float) -> Tensor:
    """Gradient [T, H] of dt for that of the step sizes."""
    d = ssd_scan.step_sizes(dt, bias, dt_softplus, -torch.inf, torch.inf)
    d_dt = d_d * ((d >= dt_min) & (d <= dt_max))
    if dt_softplus:
        d_dt = d_dt * sigmoid(dt if bias is None else dt + bias.to(dt.dtype))
    return d_dt


ssd_scan_chunked = define("ssd_scan_chunked", INPUTS, ssd_scan.OPTIONS, 2, forward, backward, ssd_scan.fake, ssd_scan.GRADIENTS)
