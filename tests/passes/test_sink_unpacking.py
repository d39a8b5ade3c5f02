"""Gathers to rows stand as late as possible, and the vocabulary is never expanded to rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn

from sp_compile.passes.row_views import Builder, RowView
from tests.passes.harness import Tiny, TinyHidden, batch, compare, errors, gradients, rewrite, run, show, targets

PASS = "sink_unpacking"
WORDS = 50


def shifted_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def logprobs_and_entropy(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax(logits[:, :-1].float(), -1)
    target = ids[:, 1:].unsqueeze(-1)
    return logprobs.gather(-1, target).squeeze(-1), -(logprobs.exp() * logprobs).sum(-1)


def test_cross_entropy_of_shifted_logits_becomes_a_loss_of_tokens() -> None:
    found = rewrite(Tiny(shifted_loss), batch())
    assert_expected_inline(
        show(found.before[PASS], "logits"),
        """\
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
unpack = unpack(logits, forest_index, 'B L _')
getitem_3 = getitem(unpack, [:, :-1])
flatten = flatten(getitem_3, 0, 1)
getitem_4 = getitem(l_ids_, [:, 1:])
flatten_1 = flatten(getitem_4)
cross_entropy = cross_entropy(flatten, flatten_1)
return [cross_entropy]
""",
    )
    assert_expected_inline(
        show(found.after[PASS], "logits"),
        """\
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
getitem = getitem(forest_index, [:, :-1])
flatten_2 = flatten(logits, 0, 1)
getitem_4 = getitem(l_ids_, [:, 1:])
flatten_1 = flatten(getitem_4)
flatten_3 = flatten(getitem, 0, 1)
cross_entropy_rows_default = sp_compile.cross_entropy_rows(flatten_2, flatten_3, flatten_1, None, ignore_index=-100, label_smoothing=0.0)
getitem_5 = getitem(cross_entropy_rows_default, 0)
getitem_6 = getitem(cross_entropy_rows_default, 1)
weighted_mean = weighted_mean(getitem_5, getitem_6)
return [weighted_mean]
""",
    )
    assert found.context.unpacked == []


def test_picked_logprobs_and_entropy_are_computed_on_tokens() -> None:
    found = rewrite(Tiny(logprobs_and_entropy), batch())
    assert_expected_inline(
        show(found.before[PASS], "logits"),
        """\
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
unpack = unpack(logits, forest_index, 'B L _')
getitem_3 = getitem(unpack, [:, :-1])
float_1 = float(getitem_3)
logprobs = log_softmax(float_1, -1)
getitem_4 = getitem(l_ids_, [:, 1:])
target = unsqueeze(getitem_4, -1)
gather = gather(logprobs, -1, target)
squeeze = squeeze(gather, -1)
exp = exp(logprobs)
mul = mul(exp, logprobs)
sum_1 = sum(mul, -1)
neg = neg(sum_1)
return [squeeze, neg]
""",
    )
    assert_expected_inline(
        show(found.after[PASS], "logits"),
        """\
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
getitem = getitem(forest_index, [:, :-1])
float_2 = float(logits)
log_softmax = log_softmax(float_2, -1)
getitem_4 = getitem(l_ids_, [:, 1:])
target = unsqueeze(getitem_4, -1)
unsqueeze = unsqueeze(getitem, -1)
flatten = flatten(log_softmax, 0, 1)
take_tokens_default = sp_compile.take_tokens(flatten, unsqueeze, target)
squeeze = squeeze(take_tokens_default, -1)
exp_1 = exp(log_softmax)
mul_1 = mul(exp_1, log_softmax)
sum_2 = sum(mul_1, -1)
neg_1 = neg(sum_2)
flatten_1 = flatten(neg_1, 0, 1)
unpack_default = sp_compile.unpack(flatten_1, getitem)
return [squeeze, unpack_default]
""",
    )
    assert found.context.unpacked == []


def test_head_on_a_slice_of_the_hidden_states_runs_on_tokens() -> None:
    def use(hidden: Tensor, head: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(head(hidden[:, :-1]).view(-1, WORDS), ids[:, 1:].reshape(-1))

    found = rewrite(TinyHidden(use), batch())
    assert_expected_inline(
        show(found.after[PASS], "hidden"),
        """\
hidden = add(embedding, reshape)
getitem = getitem(forest_index, [:, :-1])
linear_4 = linear(hidden, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
view_4 = view(linear_4, -1, 50)
getitem_4 = getitem(l_ids_, [:, 1:])
reshape_1 = reshape(getitem_4, -1)
flatten = flatten(getitem, 0, 1)
cross_entropy_rows_default = sp_compile.cross_entropy_rows(view_4, flatten, reshape_1, None, ignore_index=-100, label_smoothing=0.0)
getitem_5 = getitem(cross_entropy_rows_default, 0)
getitem_6 = getitem(cross_entropy_rows_default, 1)
weighted_mean = weighted_mean(getitem_5, getitem_6)
return [weighted_mean]
""",
    )


# -- what may not move ---------------------------------------------------------------------------------------------------------


def unchanged(use: Callable[..., Any], model: type[Tiny] = Tiny, since: str = "logits") -> str:
    """The graph after the pass, whose numbers are right."""
    error, found = compare(model(use), batch())
    assert error < 1e-10
    return show(found.after[PASS], since)


def test_last_positions_are_selected_before_the_head() -> None:
    text = unchanged(lambda hidden, head, ids: (head(hidden[:, -2:]), head(hidden[:, -1])), TinyHidden, "hidden")
    assert_expected_inline(
        text,
        """\
hidden = add(embedding, reshape)
getitem = getitem(forest_index, [:, -2:])
flatten_1 = flatten(hidden, 0, 1)
unpack_default_1 = sp_compile.unpack(flatten_1, getitem)
linear_3 = linear(unpack_default_1, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
getitem_5 = getitem(forest_index, [:, -1])
unpack_default = sp_compile.unpack(flatten_1, getitem_5)
linear_4 = linear(unpack_default, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
return [linear_3, linear_4]
""",
    )


def test_values_written_in_place_later_stay_rows() -> None:
    def use(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        cut = logits[:, :-1]
        cut /= 2.0
        return cut.logsumexp(-1), logits.exp().sum(-1)

    assert_expected_inline(
        unchanged(use),
        """\
logits = linear(unpack_default, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
cut = getitem(logits, [:, :-1])
cut_1 = itruediv(cut, 2.0)
logsumexp = logsumexp(cut_1, -1)
exp = exp(logits)
sum_1 = sum(exp, -1)
return [logsumexp, sum_1]
""",
    )


def test_writes_that_nobody_else_sees_move() -> None:
    def use(logits: Tensor, ids: Tensor) -> Tensor:
        logits.div_(2.0)
        cut = logits[:, :-1]
        cut *= 3.0
        return cut.logsumexp(-1)

    assert_expected_inline(
        unchanged(use, since="add"),
        """\
add = add(embedding, reshape)
linear_3 = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
div = div(linear_3, 2.0)
getitem = getitem(forest_index, [:, :-1])
mul = mul(div, 3.0)
logsumexp_1 = logsumexp(mul, -1)
flatten = flatten(logsumexp_1, 0, 1)
unpack_default = sp_compile.unpack(flatten, getitem)
return [unpack_default]
""",
    )


def test_writes_into_buffers_stay() -> None:
    class Counting(Tiny):
        seen: Tensor

        def forward(self, ids: Tensor, *more: Tensor) -> Any:
            logits = self.head(self.hidden(ids))
            self.seen.add_(logits[:, :-1].detach().exp().sum())
            return self.use(logits, ids), self.seen * 1

    model = Counting(shifted_loss)
    model.register_buffer("seen", torch.zeros((), dtype=torch.float64))
    first = model(batch())[1]
    result, _ = run(model, batch())
    torch.testing.assert_close(result[1], first * 2)
    torch.testing.assert_close(model.seen, first * 2)


def test_cut_without_grad_mode_stays_detached() -> None:
    def use(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            cut = logits[:, :-1]
        return cut.logsumexp(-1), logits.logsumexp(-1)

    assert_expected_inline(
        unchanged(use),
        """\
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
_set_grad_enabled = _set_grad_enabled(False)
getitem = getitem(forest_index, [:, :-1])
flatten_1 = flatten(logits, 0, 1)
unpack_default_1 = sp_compile.unpack(flatten_1, getitem)
_set_grad_enabled_1 = _set_grad_enabled(True)
logsumexp = logsumexp(unpack_default_1, -1)
logsumexp_1 = logsumexp(logits, -1)
flatten = flatten(logsumexp_1, 0, 1)
unpack_default = sp_compile.unpack(flatten, forest_index)
return [logsumexp, unpack_default]
""",
    )


def test_use_without_grad_mode_moves_and_stays_detached() -> None:
    def use(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        cut = logits[:, :-1]
        with torch.no_grad():
            largest = cut.amax(-1, keepdim=True)
        return (cut - largest).exp().sum(-1), largest

    assert_expected_inline(
        unchanged(use),
        """\
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
getitem = getitem(forest_index, [:, :-1])
_set_grad_enabled = _set_grad_enabled(False)
amax = amax(logits, -1, keepdim=True)
flatten_1 = flatten(amax, 0, 1)
unpack_default_1 = sp_compile.unpack(flatten_1, getitem)
_set_grad_enabled_1 = _set_grad_enabled(True)
sub_1 = sub(logits, amax)
exp_1 = exp(sub_1)
sum_2 = sum(exp_1, -1)
flatten = flatten(sum_2, 0, 1)
unpack_default = sp_compile.unpack(flatten, getitem)
return [unpack_default, unpack_default_1]
""",
    )


def test_operands_of_rows_and_ops_along_columns_need_rows() -> None:
    def use(logits: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        cut = logits[:, 1:]
        weight = (ids[:, :-1] > 10).to(cut.dtype).unsqueeze(-1)
        return cut * weight, cut.cumsum(1), cut.flip(1), cut.mean(1), cut + logits[:, :-1]

    text = unchanged(use)
    for line in text.splitlines():
        if any(f"= {op}(" in line for op in ("mul", "cumsum", "flip", "mean", "add")):
            assert "(unpack" in line
    assert text.count("sp_compile.unpack(") == 2


def test_sizes_made_from_rows_and_columns_do_not_reach_tokens() -> None:
    def use(logits: Tensor, ids: Tensor) -> Tensor:
        rows, columns = ids.shape
        flat = logits[:, :-1].reshape(-1, WORDS).log_softmax(-1)
        return flat.view(rows, columns - 1, 5, 10).sum(-1)

    assert_expected_inline(
        unchanged(use),
        """\
logits = linear(add, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
getitem = getitem(forest_index, [:, :-1])
reshape_2 = reshape(logits, -1, 50)
log_softmax = log_softmax(reshape_2, -1)
add_1 = add(-1, l)
reshape_3 = reshape(log_softmax, [1, -1, 5, 10])
sum_2 = sum(reshape_3, -1)
flatten = flatten(sum_2, 0, 1)
unpack_default = sp_compile.unpack(flatten, getitem)
return [unpack_default]
""",
    )


def test_long_fixed_cut_runs_on_tokens_unless_it_grows() -> None:
    def use(hidden: Tensor, head: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        cut = hidden[:, -20:-1]
        return torch.softmax(cut, -1).pow(2).sum(-1), head(cut).logsumexp(-1)

    error, found = compare(TinyHidden(use), batch(columns=30))
    assert error < 1e-10
    assert_expected_inline(
        show(found.after[PASS], "hidden"),
        """\
hidden = add(embedding, reshape)
getitem = getitem(forest_index, [:, -20:-1])
flatten_1 = flatten(hidden, 0, 1)
unpack_default_1 = sp_compile.unpack(flatten_1, getitem)
softmax_1 = softmax(hidden, -1)
pow_2 = pow(softmax_1, 2)
sum_2 = sum(pow_2, -1)
flatten = flatten(sum_2, 0, 1)
unpack_default = sp_compile.unpack(flatten, getitem)
linear_3 = linear(unpack_default_1, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
logsumexp = logsumexp(linear_3, -1)
return [unpack_default, logsumexp]
""",
    )


def test_switched_off_pass_leaves_rows() -> None:
    found = rewrite(Tiny(shifted_loss), batch(), disable=(PASS,))
    assert PASS not in found.after
    assert "cross_entropy" in targets(found.after["select_kernels"])


# -- numbers -------------------------------------------------------------------------------------------------------------------

LABELS = batch(seed=1)
LABELS[0, 3] = LABELS[1, 1] = LABELS[2, 13] = -100
LABELS[2, 5:9] = -100
WEIGHT = torch.rand(WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def _loss(**options: Any) -> Callable[..., Tensor]:
    def use(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        given = {**options, "weight": weight if options.get("weight") else None}
        return F.cross_entropy(logits[:, :-1].transpose(1, 2), labels[:, 1:], **given)

    return use


def _flat_losses(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    flat = logits[..., :-1, :].contiguous().view(-1, WORDS)
    target = labels[..., 1:].contiguous().view(-1)
    each = F.cross_entropy(flat, target, weight, reduction="none", label_smoothing=0.1).view(ids.shape[0], -1)
    return F.cross_entropy(flat.float(), target, reduction="sum"), each


def _nll(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    logprobs, target = logits[:, :-1].log_softmax(-1), labels[:, 1:]
    flat = logprobs.flatten(0, 1), target.flatten()
    means = F.nll_loss(*flat), F.nll_loss(*flat, weight), F.nll_loss(*flat, weight, reduction="sum", ignore_index=7 - 107)
    return *means, F.nll_loss(logprobs.transpose(1, 2), target, weight, reduction="none")


def _several_classes(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    candidates = torch.stack([ids[:, 1:], ids[:, :-1], ids[:, 1:] * 0], -1)
    return torch.gather(logits[:, 1:].log_softmax(2), 2, candidates)


def _indexed(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    logprobs, rows, columns = F.log_softmax(logits / 0.7, -1), torch.arange(ids.shape[0])[:, None], torch.arange(ids.shape[1] - 1)[None]
    flat = logprobs[:, :-1].reshape(-1, WORDS)
    return logprobs[rows, columns, ids[:, 1:]], flat[torch.arange(flat.shape[0]), ids[:, 1:].flatten() - WORDS]


def _cuts(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    last = logits[torch.arange(4), torch.tensor([3, 2, 1, 5])]
    parts = logits[0].exp(), logits[0, 0], logits[:, 0], logits[..., 0], logits[:, 1:, 3:7].mul(2), logits[1:, 2:].exp().mean(-1)
    narrow = logits.narrow(1, 1, 5).exp().sum(-1), logits.select(1, 3), logits.index_select(1, torch.tensor([1, 3]))
    return last, *parts, *narrow, logits[:, None, 1:].exp().sum(-1), torch.narrow(logits, 1, 0, ids.shape[1] - 2).logsumexp(-1)


def _several_results(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    top = logits[:, :-1].softmax(-1).topk(3, -1)
    largest = logits[:, 2:].max(-1)
    left, right = logits[:, 1:].chunk(2, -1)
    return top.values, largest.values, largest.indices, logits[:, :-1].argmax(-1) == ids[:, 1:], (left * right).sum(-1)


def _normed(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    cut = logits[:, 1:]
    whole = (logits - logits.max()).exp().sum(-1)
    return F.normalize(cut, dim=-1).sum(-1), F.layer_norm(cut, (WORDS,)).pow(2).sum(-1), torch.stack([cut, cut * 2]).exp().sum(-1), whole


USES: dict[str, Callable[..., Any]] = {
    "mean": _loss(),
    "weighted mean": _loss(weight=True),
    "smoothed mean": _loss(label_smoothing=0.2),
    "weighted and smoothed mean": _loss(weight=True, label_smoothing=0.2),
    "sum": _loss(reduction="sum"),
    "none": _loss(reduction="none"),
    "flat losses": _flat_losses,
    "nll": _nll,
    "several classes": _several_classes,
    "indexed": _indexed,
    "cuts": _cuts,
    "several results": _several_results,
    "normed": _normed,
}
EXPANDED = {"cuts", "normed"}
"""Uses that ask for rows of logits."""


@pytest.mark.parametrize("name", USES)
def test_results_and_gradients_equal_the_dense_ones(name: str) -> None:
    error, found = compare(Tiny(USES[name]), batch(), LABELS, WEIGHT)
    assert error < (1e-6 if name == "flat losses" else 1e-10)
    assert any("sp_compile." in target for target in targets(found.after[PASS])[-12:])
    assert name in EXPANDED or found.context.unpacked in ([], ["argmax for eq"])


def test_mean_of_nothing_is_nan() -> None:
    def use(logits: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        return F.cross_entropy(logits.view(-1, WORDS), labels.view(-1)), logits.logsumexp(-1)

    result, _ = run(Tiny(use), batch(), torch.full_like(LABELS, -100))
    assert bool(result[0].isnan())


def test_losses_under_autocast_have_the_dense_dtype() -> None:
    def use(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            cut = (logits @ torch.eye(WORDS))[:, :-1]
            return cut.logsumexp(-1), F.cross_entropy(cut.flatten(0, 1), ids[:, 1:].flatten())

    error, found = compare(Tiny(use, dtype=torch.float32), batch())
    assert error < 2e-2
    assert "cross_entropy" not in targets(found.after[PASS])


@pytest.mark.parametrize("inner", ["aot_eager"])
def test_inner_compilers_accept_the_graph(inner: str) -> None:
    def use(logits: Tensor, ids: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (*_nll(logits, ids, labels, weight), *_indexed(logits, ids, labels, weight), _loss()(logits, ids, labels, weight))

    error, _ = compare(Tiny(use), batch(), LABELS, WEIGHT, inner=inner)
    assert error < 1e-10


def test_shifted_index_is_caught_by_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Builder.index

    def wrong(self: Builder, view: RowView) -> torch.fx.Node:
        return self.method("roll", right(self, view), 1, -1)

    monkeypatch.setattr(Builder, "index", wrong)
    found, _ = errors(Tiny(shifted_loss), batch())
    assert found["0"] > 1e-3
    assert found["head.weight"] > 1e-2


# -- memory --------------------------------------------------------------------------------------------------------------------


def largest_allocation(step: Callable[[], None]) -> int:
    """Bytes of the largest single allocation, those inside of custom ops included."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    found = profile.profiler
    assert found is not None
    return max(event.nbytes() for event in found.kineto_results.events() if event.name() == "[memory]")


@pytest.mark.parametrize("use", [shifted_loss, logprobs_and_entropy], ids=lambda use: use.__name__)
def test_vocabulary_is_never_expanded_to_rows(use: Callable[..., Any]) -> None:
    words, rows, columns, prefix = 5000, 16, 24, 20
    model = Tiny(use, words=words, dtype=torch.float32)
    ids = batch(rows, columns, prefix, words)
    expanded = rows * (columns - 1) * words * 4
    run(model, ids)
    compiled = torch.compile(model, backend="shared_prefix", options={"inner": "eager", "strict": True, "min_sharing": 1.0})  # type: ignore[call-overload]
    gradients(model, compiled(ids))
    assert largest_allocation(lambda: _step(model, model, ids)) >= expanded
    tokens = prefix + rows * (columns - prefix)
    assert largest_allocation(lambda: _step(model, compiled, ids)) <= tokens * words * 4 < expanded


def _step(model: nn.Module, call: Callable[..., Any], ids: Tensor) -> None:
    gradients(model, call(ids))
