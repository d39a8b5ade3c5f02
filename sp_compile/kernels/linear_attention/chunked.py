"""`sp_compile::linear_attention_chunked`: the op of the same name over a plan of chunks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_compile.kernels.delta_rule.slots import Form, of_block, tokens
from sp_compile.kernels.linear_attention.local import Chunks, chunks_of, gradients
from sp_compile.kernels.scan.chunks import Block, Gradient, ascend, descend, final_gradients, make_plan, write
from sp_compile.ops import linear_attention, matrix_states
from sp_compile.ops.recurrent import Values, define

INPUTS = f"{linear_attention.INPUTS}, Tensor chunks"


class Call:
    """One call of the op; shapes as its, without the leading 1."""

    def __init__(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> None:
        q, k, v, g, decay, _, _, self.initial, final, chunks = inputs
        self.q, self.k, self.v, self.scale = q[0], k[0], v[0], options["scale"]
        count, self.heads, self.columns = self.v.shape
        self.rows = self.k.shape[2]
        self.form = Form.of(v, chunks)
        if g is not None:
            self.g = g[0]
        else:
            self.g = (self.v.new_zeros(self.heads) if decay is None else decay)[None].expand(count, self.heads)
        self.plan = make_plan(chunks, count, final, self._cost)
        self.own = self.v.new_empty((self.plan.chunks, self.heads, self.rows, self.columns), dtype=self.form.dtype)
        self.whole = self.own.new_empty((self.plan.chunks, self.heads, 1, 1))

    def _cost(self, length: int) -> int:
        size = self.form.size(length)
        return int(self.heads * size * max(size, self.rows + self.columns))

    def _load(self, block: Block) -> Chunks:
        q, k, v, g = (self.form.slots(x, block) for x in (self.q, self.k, self.v, self.g[..., None]))
        made = chunks_of(q, k, v, g)
        self.own[block.chunks] = made.own().view(-1, *self.own.shape[1:])
        self.whole[block.chunks] = made.decays.whole.view(-1, *self.whole.shape[1:])
        return made

    def _descend(self) -> Tensor:
        return descend(self.plan, self.own, self.initial, lambda span, entering: self._leaving(span, entering))

    def _leaving(self, span: slice | Tensor, entering: Tensor) -> Tensor:
        return torch.addcmul(self.own[span], self.whole[span], entering)

    def forward(self) -> tuple[Tensor, Tensor]:
        """`(out [T, H, V], states [F, H, K, V])`."""
        kept = [self._load(block) for block in self.plan.blocks]
        entering = self._descend()
        out = torch.empty_like(self.v, memory_format=torch.contiguous_format)
        for block in reversed(self.plan.blocks):
            write(out, block, tokens(kept.pop().read_out(of_block(entering, block), self.scale), block, self.heads))
        last = self.plan.final
        return out, entering.new_zeros((0, *entering.shape[1:])) if last is None else self._leaving(last, entering[last])

    def backward(self, grad: Tensor, grad_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
        """Gradients of q, k, v, g [T, H] and initial, in accumulation dtype."""
        kept: list[tuple[Chunks, Tensor]] = []
        d_entering = torch.empty_like(self.own)
        for block in self.plan.blocks:
            made = self._load(block)
            d_out = self.form.slots(grad, block, written=True).mul_(self.scale)
            d_entering[block.chunks] = made.state_back(d_out).view(-1, *self.own.shape[1:])
            kept.append((made, d_out))
        entering = self._descend()
        leaving = final_gradients(self.plan, entering, grad_states)
        d_initial = ascend(self.plan, leaving, self.initial, lambda span, one: torch.addcmul(d_entering[span], self.whole[span], one))
        sums = [Gradient(self.plan, x, self.form.dtype) for x in (self.q, self.k, self.v, self.g)]
        for block in reversed(self.plan.blocks):
            made, d_out = kept.pop()
            found = gradients(made, of_block(entering, block), d_out, of_block(leaving, block))
            d_q, d_k, d_v, d_g = (tokens(x, block, self.heads) for x in found)
            for total, values in zip(sums, (d_q, d_k, d_v, d_g[..., 0]), strict=True):
                total.add(block, values)
        d_q, d_k, d_v, d_g = (total.total() for total in sums)
        return d_q, d_k, d_v, d_g, d_initial


def _forward(*inputs: Any, **options: Any) -> tuple[Tensor, Tensor]:
    linear_attention.check_inputs(*inputs[:9], chunk=options.get("chunk", 64))
    out, states = Call(inputs, options).forward()
    return out[None], states


def _backward(grads: Values, inputs: tuple[Any, ...], options: dict[str, Any]) -> Values:
    d_q, d_k, d_v, d_g, d_initial = Call(inputs, options).backward(grads[0][0], grads[1])
    found = (d_q[None], d_k[None], d_v[None], d_g[None], d_g.sum(0, dtype=torch.float64), d_initial)
    return matrix_states.rounded(found, (*inputs[:5], inputs[7]), grads[0])


linear_attention_chunked = define(
    "linear_attention_chunked",
    INPUTS,
    linear_attention.OPTIONS,
    2,
    _forward,
    _backward,
    matrix_states.fake,
    linear_attention.GRADIENTS,
)
