"""Runs attention's Triton kernels in Triton's interpreter, in a process of its own: Triton must be imported under TRITON_INTERPRET=1."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from sp_compile.layout import Forest
from sp_compile.ops.attention import attention_inputs
from sp_compile.ops.numerics import relative_error
from tests.determinism.replay import differing, same_bits
from tests.ops.forests import dense_attention, forest, random_forest

SEMANTIC = torch.ops.sp_compile.attention.default


@dataclasses.dataclass(frozen=True)
class Case:
    """A forest, by name, seed or as numbers of tokens of one row, and a call; `tile` is that of queries, of keys, and of the lists."""

    tree: str | int | tuple[int, int, int] = 0
    tile: tuple[int, int, int] = (16, 16, 16)
    dtype: torch.dtype = torch.float32
    dims: tuple[int, int] = (16, 16)
    heads: tuple[int, int] = (2, 1)
    sinks: bool = False
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    scale: float = 0.3
    padded: bool = False
    descriptors: bool = False
    token_major: bool = True

    def forest(self) -> Forest:
        if isinstance(self.tree, str):
            return forest(self.tree)
        if isinstance(self.tree, tuple):
            seed, rows, length = self.tree
            return random_forest(seed, rows, length)
        return Forest.from_rows([[*range(self.tree)]])

    @property
    def options(self) -> dict[str, Any]:
        return {"scale": self.scale, "window": self.window, "chunk": self.chunk, "softcap": self.softcap}

    def inputs(self, tree: Forest) -> list[Tensor | None]:
        made = attention_inputs(
            tree.tensor("end", "cpu"), tree.tensor("column", "cpu"), dims=self.dims, heads=self.heads, dtype=self.dtype, sinks=self.sinks
        )
        if self.token_major:
            made[:3] = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in made[:3] if x is not None]
        if self.padded:
            made[5] = (torch.arange(tree.num_tokens) % 5 > 1)[None]
        return made

    def given(self, tree: Forest, inputs: list[Tensor | None]) -> list[Tensor | None]:
        from sp_compile.layout.attention_tiles import make_lists, tile_array

        end = tree.tensor("end", "cpu").numpy()
        lists = make_lists(end, tree.column, self.window, self.chunk, self.tile[2])
        tiles = tile_array(lists, end, tree.column, self.window, self.chunk)
        return [*inputs, torch.from_numpy(lists.shape), torch.from_numpy(tiles), torch.tensor([int(self.padded)])]


def prepare() -> None:
    """Mends the interpreter: integers of one-element arrays (an error since numpy 2.4), products of bfloat16, which it holds as bits."""
    from triton.runtime import interpreter

    language, builder = interpreter._patch_lang_tensor, interpreter.InterpreterBuilder

    def patched(tensor: Any, scope: Any) -> None:
        language(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def floats(x: Any) -> Any:
        if x.data.dtype != np.uint16:
            return x.data.astype(np.float32)
        return (x.data.astype(np.uint32) << 16).view(np.float32)

    def dot(self: Any, a: Any, b: Any, d: Any, precision: Any, imprecise: Any) -> Any:
        return interpreter.TensorHandle(np.matmul(floats(a), floats(b)) + d.data, d.dtype.scalar)

    interpreter._patch_lang_tensor = patched
    builder.create_dot = dot


def _op(case: Case) -> Any:
    from sp_compile.kernels.attention.forest_triton import launch, ops
    from sp_compile.kernels.attention.forest_triton.variants import Variant

    variant = Variant(*case.tile[:2], warps=4, stages=1, descriptors=case.descriptors)
    launch.pick = lambda *_: variant
    return ops.attention_triton


def gradient(out: Tensor) -> Tensor:
    return torch.linspace(-1, 1, out.numel(), dtype=torch.float64).sin_().mul_(7919).sin_().view(out.shape).to(out.dtype)


def run(case: Case) -> list[Tensor]:
    """out, lse and the gradients of q, k, v and sinks; memory that kernels are to write holds NaN before."""
    op, tree = _op(case), case.forest()
    inputs = case.inputs(tree)
    torch.use_deterministic_algorithms(True)
    out, lse = op(*case.given(tree, inputs), **case.options)
    leaves = [x for x in inputs if x is not None and x.requires_grad]
    return [out.detach(), lse, *torch.autograd.grad(out, leaves, gradient(out))]


def errors(case: Case) -> list[float]:
    """Of out and the gradients against the semantic op in float64; nan if anything is not finite."""
    tree = case.forest()
    inputs = case.inputs(tree)
    got = run(case)
    wide = [x.detach().double().requires_grad_(x.requires_grad) if x is not None and x.is_floating_point() else x for x in inputs]
    out = SEMANTIC(*wide, **case.options)
    leaves = [x for x in wide if x is not None and x.requires_grad]
    want = [out.detach(), *torch.autograd.grad(out, leaves, gradient(out))]
    assert all(x.transpose(1, 2).is_contiguous() for x in got if x.dim() == 4), "results are token-major"
    return [relative_error(x, y) if x.isfinite().all() else float("nan") for x, y in zip([got[0], *got[2:]], want, strict=True)]


def errors_of_rows(case: Case) -> list[float]:
    """Of out in every row, and of the gradients, against dense attention on full rows in float64."""
    op, tree = _op(case), case.forest()
    inputs = case.inputs(tree)
    wide = [x.detach().double().requires_grad_() if x is not None and x.is_floating_point() else x for x in inputs]
    out, _ = op(*case.given(tree, inputs), **case.options)
    options = {name: value for name, value in case.options.items() if value is not None}
    rows = dense_attention(tree, *wide[:3], sinks=wide[8], key_valid=wide[5], **options)
    generator = torch.Generator().manual_seed(1)
    found, losses = [], [out.new_zeros(()), rows[0].new_zeros(())]
    for row, want in zip(tree.tensor("index", "cpu"), rows, strict=True):
        got = out[0][:, row[row >= 0]]
        weight = torch.randn(want.shape, generator=generator, dtype=torch.float64)
        losses = [losses[0] + (got * weight.to(got.dtype)).sum(), losses[1] + (want * weight).sum()]
        found.append(relative_error(got, want))
    gradients = [
        torch.autograd.grad(loss, [x for x in values if x is not None and x.requires_grad])
        for loss, values in zip(losses, (inputs, wide), strict=True)
    ]
    return found + [relative_error(x, y) for x, y in zip(*gradients, strict=True)]


def checked(case: Case) -> None:
    """torch's own checks of the op: schema, fakes, autograd registration."""
    op, tree = _op(case), case.forest()
    torch.library.opcheck(op, tuple(case.given(tree, case.inputs(tree))), case.options)


def replayed(case: Case) -> list[str]:
    """Results whose bits change over repeated runs."""
    op, tree = _op(case), case.forest()
    inputs = case.inputs(tree)
    given = case.given(tree, inputs)
    return differing(lambda: list(op(*given, **case.options)), [x for x in inputs if x is not None and x.requires_grad])


def agree(case: Case, other: Case) -> list[bool]:
    return [same_bits(one, two) for one, two in zip(run(case), run(other), strict=True)]


def refusal(case: Case, position: int, value: Tensor | None) -> str:
    """What the op says when one of its arguments is another."""
    op, tree = _op(case), case.forest()
    given = case.given(tree, case.inputs(tree))
    given[position] = value
    try:
        op(*given, **case.options)
    except Exception as error:  # the text is what is tested
        return f"{type(error).__name__}: {error}"
    return "none"


def start() -> ProcessPoolExecutor:
    """One process in which the functions of this module run."""
    with mock.patch.dict(os.environ, {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}):
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=prepare)
        pool.submit(prepare_threads).result()
    return pool


def prepare_threads() -> None:
    torch.set_num_threads(1)
