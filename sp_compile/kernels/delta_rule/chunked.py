"""Both delta rules over a plan of chunks: read, work inside of chunks, pass states, write; and the same backward."""

from __future__ import annotations

import torch
from torch import Tensor

from sp_compile.kernels.delta_rule.local import Chunks, Inputs, chunks_of, gradients, read_out, read_out_back
from sp_compile.kernels.delta_rule.passing import Passing
from sp_compile.kernels.delta_rule.slots import Form, of_block, tokens
from sp_compile.kernels.scan.chunks import Block, Gradient, look, make_plan, write
from sp_compile.ops.matrix_states import l2norm, l2norm_backward


class Rule:
    """A call of either op; shapes as theirs, without the leading 1. `g` is [T, H, 1 or K]."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, initial: Tensor | None, final: Tensor | None, chunks: Tensor,
        scale: float, qk_l2norm: bool,
    ) -> None:  # fmt: skip
        self.q, self.k, self.v, self.g, self.beta, self.initial = q, k, v, g, beta, initial
        self.scale, self.qk_l2norm = scale, qk_l2norm
        self.form = Form.of(v, chunks)
        self.heads, self.columns = v.shape[1:]
        self.groups, self.rows = k.shape[1:]
        self.plan = make_plan(chunks, v.shape[0], final, self._cost)

    def _cost(self, length: int) -> int:
        size = self.form.size(length)
        return self.heads * size * max(2 * size, self.rows + self.columns)

    def _passing(self) -> Passing:
        return Passing(self.plan, self.form, self.v, self.heads, self.rows, self.columns, self.g.shape[2])

    def forward(self) -> tuple[Tensor, Tensor]:
        """`(out [T, H, V], states [F, H, K, V])`."""
        passing = self._passing()
        kept: list[tuple[Tensor, Tensor]] = []
        for block in self.plan.blocks:
            made = chunks_of(self._load(block))
            passing.keep(block, made)
            kept.append((made.products, made.from_start))
        passing.descend(self.initial)
        out = torch.empty_like(self.v, memory_format=torch.contiguous_format)
        for block in reversed(self.plan.blocks):
            result = read_out(*kept.pop(), of_block(passing.entering, block), passing.written_of(block), self.scale)
            write(out, block, tokens(result, block, self.heads))
        return out, passing.final_states()

    def backward(self, grad: Tensor, grad_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v, g, beta and initial, in accumulation dtype."""
        passing = self._passing()
        kept: list[tuple[Chunks, Tensor]] = []
        for block in self.plan.blocks:
            made = chunks_of(self._load(block))
            d_out = self.form.slots(grad, block, written=True).mul_(self.scale)
            passing.keep(block, made)
            passing.keep_back(block, *read_out_back(made.products, made.from_start, d_out))
            kept.append((made, d_out))
        passing.descend(self.initial)
        d_initial = passing.ascend(self.initial, grad_states)
        sums = [Gradient(self.plan, x, self.form.dtype) for x in (self.q, self.k, self.v, self.g, self.beta)]
        for block in reversed(self.plan.blocks):
            made, d_out = kept.pop()
            state, leaving = passing.states_of(block)
            d_rows, *others = gradients(made, state, passing.written_of(block), d_out, passing.d_written_of(block), leaving)
            d_v, d_g, d_beta = (tokens(x, block, self.heads) for x in others)
            for total, values in zip(sums, (*self._ungrouped(d_rows, block), d_v, d_g, d_beta[..., 0]), strict=True):
                total.add(block, values)
        d_q, d_k, d_v, d_g, d_beta = (total.total() for total in sums)
        return d_q, d_k, d_v, d_g, d_beta, d_initial

    def _load(self, block: Block) -> Inputs:
        size, length = self.form.size(block.length), block.length
        shape = (len(block.chunks), self.groups, self.heads // self.groups, size, 2, self.rows)
        rows = self.v.new_empty(shape, dtype=self.form.dtype)
        for which, x in enumerate((self.q, self.k)):
            values = look(x, block).to(self.form.dtype)
            values = l2norm(values) if self.qk_l2norm else values
            rows[:, :, :, :length, which] = values.transpose(1, 2)[:, :, None]
        rows[:, :, :, length:] = 0
        v, g, beta = (self.form.slots(x, block) for x in (self.v, self.g, self.beta[..., None]))
        return Inputs(rows.view(-1, size, 2, self.rows), v, g, beta)

    def _ungrouped(self, d_rows: Tensor, block: Block) -> list[Tensor]:
        """Gradients [n, l, groups, K] of q and k, before normalisation, from those of the rows of each head."""
        per_head = d_rows.view(-1, self.groups, self.heads // self.groups, *d_rows.shape[1:])[:, :, :, : block.length]
        found = []
        for which, x in enumerate((self.q, self.k)):
            values = per_head[:, :, :, :, which].sum(2).transpose(1, 2)
            found.append(l2norm_backward(look(x, block).to(self.form.dtype), values) if self.qk_l2norm else values)
        return found
