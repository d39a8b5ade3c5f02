"""Reductions over tokens count each physical token as often as rows pass through it, or see rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from sp_compile.ops import multiplicity
from sp_compile.ops.tokens import unpack
from tests.passes.harness import Tiny, TinyHidden, batch, compare, rewrite, run, show, targets

PASS = "expand_multiplicities"
TOLERANCE = 1e-10
SIZE = 8


def hidden(use: Callable[..., Any]) -> nn.Module:
    """A model that returns what `use` makes of its hidden states, beside something that has a gradient."""
    return TinyHidden(lambda hidden, head, ids: (use(hidden), head(hidden)[0, 0]))


def load(hidden: Tensor) -> tuple[Tensor, Tensor]:
    """What a load-balancing loss is made of."""
    probs = hidden.view(-1, SIZE).softmax(-1)
    chosen = probs.topk(2, -1).indices
    return F.one_hot(chosen, SIZE).float().mean(0), probs.mean(0)


def test_means_and_counts_read_tokens() -> None:
    found = rewrite(hidden(load), batch())
    assert_expected_inline(
        show(found.before[PASS], "probs"),
        """\
probs = softmax(view_3, -1)
topk = topk(probs, 2, -1)
chosen = getitem(topk, 1)
one_hot = one_hot(chosen, 8)
float_1 = float(one_hot)
unpack = unpack(float_1, forest_index, 'B*L _ _')
mean = mean(unpack, 0)
unpack_1 = unpack(probs, forest_index, 'B*L _')
mean_1 = mean(unpack_1, 0)
linear_3 = linear(hidden, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
unpack_2 = unpack(linear_3, forest_index, 'B L _')
getitem_5 = getitem(unpack_2, [0, 0])
return [mean, mean_1, getitem_5]
""",
    )
    assert_expected_inline(
        show(found.after[PASS], "probs"),
        """\
probs = softmax(view_3, -1)
topk = topk(probs, 2, -1)
chosen = getitem(topk, 1)
one_hot = one_hot(chosen, 8)
float_1 = float(one_hot)
token_mean = token_mean(float_1, forest_count, forest_index, 'B*L _ _', [0], False, None)
token_mean_1 = token_mean(probs, forest_count, forest_index, 'B*L _', [0], False, None)
linear_3 = linear(hidden, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
unpack_2 = unpack(linear_3, forest_index, 'B L _')
getitem_5 = getitem(unpack_2, [0, 0])
return [token_mean, token_mean_1, getitem_5]
""",
    )
    assert found.context.unpacked == []


def scattered(hidden: Tensor) -> Tensor:
    chosen = hidden.view(-1, SIZE).topk(2, -1).indices.view(-1)
    counts = torch.zeros(SIZE, dtype=torch.int64)
    counts.scatter_add_(0, chosen, torch.ones_like(chosen))
    return counts


def test_scattered_counts_read_tokens() -> None:
    found = rewrite(hidden(scattered), batch())
    assert_expected_inline(
        show(found.after[PASS], "chosen"),
        """\
chosen = view(getitem_4, -1)
counts = zeros(8, dtype=torch.int64)
weighted = weighted(1.0, chosen, forest_count, 'B*L*2', torch.int64)
scatter_add_ = scatter_add(counts, 0, chosen, weighted)
linear_3 = linear(hidden, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
unpack_1 = unpack(linear_3, forest_index, 'B L _')
getitem_5 = getitem(unpack_1, [0, 0])
return [scatter_add_, getitem_5]
""",
    )
    assert found.context.unpacked == []


def _sorted(hidden: Tensor) -> Tensor:
    chosen = hidden.view(-1, SIZE).topk(2, -1).indices.view(-1)
    return torch.histc(chosen.sort().values.float(), bins=SIZE, min=0, max=SIZE - 1)


def _layers(hidden: Tensor) -> Tensor:
    """The routers of two layers one after the other, as in transformers."""
    both = torch.cat([hidden.view(-1, SIZE), 2 * hidden.view(-1, SIZE)], 0).softmax(-1)
    return F.one_hot(both.topk(2, -1).indices, SIZE).float().mean(0) * both.mean(0)


def _indexed(hidden: Tensor) -> tuple[Tensor, Tensor]:
    flat = hidden.reshape(-1, SIZE)
    chosen = flat.argmax(-1)
    sums = torch.zeros(SIZE, SIZE, dtype=hidden.dtype).index_add(0, chosen, flat)
    spread = torch.zeros(SIZE, dtype=hidden.dtype)
    spread.index_add_(0, chosen, flat[:, 0], alpha=2)
    return sums, spread


def _scattered_weights(hidden: Tensor) -> Tensor:
    weights, chosen = hidden.view(-1, SIZE).softmax(-1).topk(2, -1)
    return torch.zeros(SIZE, dtype=hidden.dtype).scatter_add(0, chosen.flatten(), weights.flatten())


REDUCTIONS: dict[str, Callable[[Tensor], Any]] = {
    "sum": lambda h: h.sum(),
    "sum of both": lambda h: h.sum((0, 1), keepdim=True),
    "sum of truth": lambda h: (h > 0).sum(dim=(0, 1)),
    "mean": lambda h: h.mean(dim=(0, 1), dtype=torch.float64),
    "var": lambda h: (h.var(), h.std((0, 1)), torch.var(h, (0, 1), correction=0), h.var(dim=(0, 1), unbiased=False, keepdim=True)),
    "norm": lambda h: (h.norm(), torch.linalg.vector_norm(h, 3, (0, 1)), torch.linalg.vector_norm(h, float("inf")), h.norm(p=1)),
    "logsumexp": lambda h: h.logsumexp((0, 1)),
    "greatest": lambda h: (h.amax((0, 1)), h.min(), h.relu().amin((0, 1)), (h > 1).any(), (h > -9).all()),
    "nonzero": lambda h: h.relu().count_nonzero(),
    "z loss": lambda h: h.logsumexp(-1).square().mean(),
    "columns first": lambda h: h.transpose(0, 1).sum((0, 1)),
    "sorted": _sorted,
    "layers": _layers,
    "indexed": _indexed,
    "weights": _scattered_weights,
    "used by tokens": lambda h: h - h.mean((0, 1)) / (1 + h.std()),
}


@pytest.mark.parametrize("name", REDUCTIONS)
def test_numbers(name: str) -> None:
    """Results and all gradients equal the dense ones, and no rows were made."""
    error, found = compare(hidden(REDUCTIONS[name]), batch())
    assert error < TOLERANCE
    assert found.context.unpacked == []
    assert any(target.startswith(("token_", "weighted")) for target in targets(found.after[PASS]))


def test_values_that_tokens_use_before_attention() -> None:
    class Centred(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = self.words(ids)
            x = x - x.mean((0, 1))
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    error, _ = compare(Centred(lambda logits, ids: logits), batch())
    assert error < TOLERANCE


# -- must not be rewritten ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "use",
    [
        lambda h: h.sum(1),
        lambda h: h.mean(0),
        lambda h: h.view(-1, SIZE).median(0).values,
        lambda h: h.view(-1, SIZE).cumsum(0),
        lambda h: h[:, 1:].sum((0, 1)),
        lambda h: h.prod(),
        lambda h: torch.histc(h, bins=4, min=-1, max=1),
    ],
)
def test_others_see_rows(use: Callable[[Tensor], Tensor]) -> None:
    error, found = compare(hidden(use), batch())
    assert error < TOLERANCE
    assert not any(target.startswith(("token_", "weighted")) for target in targets(found.after[PASS]))
    assert found.context.unpacked or targets(found.after["sink_unpacking"]).count("sp_compile.unpack") > 1


def test_sums_over_other_dimensions_stay() -> None:
    found = rewrite(hidden(lambda h: h.sum(-1)), batch())
    assert not any(target.startswith("token_") for target in targets(found.after[PASS]))


def test_sums_in_a_custom_function_are_refused() -> None:
    class Mean(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x - x.mean((0, 1))

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return grad - grad.mean((0, 1))

    class Custom(Tiny):
        def hidden(self, ids: Tensor) -> Tensor:
            x = Mean.apply(self.words(ids))
            q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    with pytest.raises(BackendCompilerFailed, match="written backward"):
        run(Custom(lambda logits, ids: logits), batch())


@pytest.mark.parametrize("name", ["indexed", "var", "used by tokens"])
def test_switched_off_it_is_right_on_rows(name: str) -> None:
    error, _ = compare(hidden(REDUCTIONS[name]), batch(), disable=[PASS])
    assert error < TOLERANCE


# -- a planted fault ---------------------------------------------------------------------------------------------------------------


def test_numbers_show_counts_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    right = multiplicity.weights
    monkeypatch.setattr(multiplicity, "weights", lambda count, pattern: torch.ones_like(right(count, pattern)))
    for name in ("sum", "var", "norm", "logsumexp", "layers", "indexed", "weights"):
        error, _ = compare(hidden(REDUCTIONS[name]), batch())
        assert error > 1e-3, name


# -- padding -----------------------------------------------------------------------------------------------------------------------


class Padded(Tiny):
    """`use(hidden, mask)` of a model whose attention hides padding."""

    def forward(self, ids: Tensor, mask: Tensor) -> Any:
        x = self.words(ids)
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        seen = torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril() & mask.bool()[:, None, None, :]
        x = x + F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return self.head(x) * mask[..., None] if self.use is None else self.use(x, mask)


def _mask(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[:2, -3:] = 0
    return mask


TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
MASKED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "all": (lambda h, m: h.sum((0, 1)), False),
    "product": (lambda h, m: (h * m[..., None]).sum((0, 1)), True),
    "mean of a product": (lambda h, m: (m.unsqueeze(-1).to(h.dtype) * h).mean((0, 1)), True),
    # torch 2.11 captures the comparison in a way in which the zeros are not seen, and the padding is kept
    "filled": (lambda h, m: h.masked_fill((m == 0)[..., None], 0.0).sum((0, 1)), TORCH >= (2, 13)),
    "chosen": (lambda h, m: torch.where(m.bool()[..., None], h, 0.0).view(-1, SIZE).norm(dim=0), True),
    "per token": (lambda h, m: (h.view(-1, SIZE) * m.reshape(-1, 1)).sum(0) / m.sum(), True),
    "greatest of a product": (lambda h, m: (h * m[..., None]).amax((0, 1)), False),
    "twice": (lambda h, m: (h * m[..., None]).sum((0, 1)) + h.sum((0, 1)), False),
    "number times mask": (lambda h, m: (h * m.sum()).sum((0, 1)), False),
}


@pytest.mark.parametrize("name", MASKED)
def test_padding_is_counted_as_by_the_dense_graph(name: str) -> None:
    """It is dropped only where a mask multiplies every sum."""
    use, dropped = MASKED[name]
    ids = batch()
    error, _ = compare(Padded(use), ids, _mask(ids))
    import sp_compile

    assert error < TOLERANCE
    assert sp_compile.last_run().logical_tokens == (int(_mask(ids).sum()) if dropped else ids.numel())


def test_option_leaves_padding_out() -> None:
    """The counts and means are those of the real tokens."""
    ids = batch()
    mask = _mask(ids)

    def use(h: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
        flat = h.view(-1, SIZE)
        return F.one_hot(flat.argmax(-1), SIZE).sum(0), flat.mean(0)

    (counts, mean), _ = run(Padded(use), ids, mask, count_padding=False)
    real = Padded(lambda h, m: h[m.bool()])(ids, mask)
    assert torch.equal(counts, F.one_hot(real.argmax(-1), SIZE).sum(0))
    torch.testing.assert_close(mean, real.mean(0), rtol=TOLERANCE, atol=TOLERANCE)
    (counts, _), _ = run(Padded(use), ids, mask, count_padding=True)
    assert int(counts.sum()) == ids.numel()


def test_option_where_nothing_is_counted_is_an_error() -> None:
    with pytest.raises(BackendCompilerFailed, match="count_padding"):
        run(Tiny(lambda logits, ids: logits), batch(), count_padding=True)
    with pytest.raises(BackendCompilerFailed, match="padding mask"):
        run(hidden(lambda h: h.sum()), batch(), count_padding=False)


# -- the functions themselves ------------------------------------------------------------------------------------------------------


def _forest(seed: int) -> tuple[Tensor, Tensor]:
    """count [T] and index [B, L] of rows that share at random, written down without the layout room."""
    generator = np.random.default_rng(seed)
    ids = generator.integers(0, 2, (5, 7))
    seen: dict[tuple[int, ...], int] = {}
    index = np.array([[seen.setdefault(tuple(row[: at + 1]), len(seen)) for at in range(7)] for row in ids])
    return torch.from_numpy(np.bincount(index.ravel())), torch.from_numpy(index)


@pytest.mark.parametrize("pattern", ["B L _", "B*L _", "B*L*3 _", "2*B*L _", "B L*3 _"])
def test_weights_follow_the_layout(pattern: str) -> None:
    count, index = _forest(0)
    plain = int(np.prod([int(f) for dim in pattern.split() for f in dim.split("*") if f.isdigit()]))
    shape = {"B L _": (1, len(count), 4), "B L*3 _": (1, 3 * len(count), 4)}.get(pattern, (plain * len(count), 4))
    value = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    dense = unpack(value, index, pattern)
    dims = list(range(value.dim() - 1))
    found = multiplicity.token_sum(value, count, pattern, dims)
    torch.testing.assert_close(found, dense.sum(dims), rtol=TOLERANCE, atol=TOLERANCE)


def test_counts_are_exact_beyond_float32() -> None:
    many = (1 << 24) + 1
    count = torch.tensor([many, 1, many])
    chosen = torch.tensor([[1, 0, 1]])
    assert multiplicity.token_sum(F.one_hot(chosen, 3), count, "B L _", [0, 1]).tolist() == [1, 2 * many, 0]
    assert multiplicity.token_sum(chosen == 1, count, "B L").item() == 2 * many
    assert multiplicity.token_bincount(chosen[0], count, "B*L", None, 3).tolist() == [1, 2 * many, 0]
    ones = multiplicity.weighted(1.0, chosen[0], count, "B*L", torch.int64)
    assert torch.zeros(3, dtype=torch.int64).scatter_add(0, chosen[0], ones).tolist() == [1, 2 * many, 0]
    assert multiplicity.token_count_nonzero(chosen, count, "B L").item() == 2 * many
    values = torch.tensor([[0.1, 0.7, 0.2]])
    wanted = (np.float64(np.float32(0.1)) * many + np.float64(np.float32(0.7)) + np.float64(np.float32(0.2)) * many) / (2 * many + 1)
    assert multiplicity.token_mean(values, count, None, "B L").item() == np.float32(wanted)


def test_equal_greatest_values_share_the_gradient_as_in_rows() -> None:
    count, index = _forest(2)
    value = torch.ones(1, len(count), dtype=torch.float64)
    value[0, ::3] = 0.5
    value.requires_grad_()
    wanted = torch.autograd.grad(unpack(value, index, "B L").amax(), value)[0]
    found = torch.autograd.grad(multiplicity.token_extreme(value, count, "B L", "amax"), value)[0]
    torch.testing.assert_close(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
