"""(Query, key) masks that the caller makes and passes in: shared if their values hide later columns, and looked at in every call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from tests.e2e import compare
from tests.e2e.decoders import Decoder
from tests.e2e.models import llama, spread
from tests.e2e.scenarios import Batch, both_padded, forest, right_padded, star

LOWEST = torch.finfo(torch.float32).min


def causal(mask: Tensor) -> Tensor:
    """bool [B, 1, L, L], True for keys up to the query that are no padding; a pad sees itself, so that no softmax is empty."""
    size = mask.shape[1]
    one = torch.eye(size, dtype=torch.bool)
    return ((torch.ones(size, size, dtype=torch.bool).tril() & (mask != 0)[:, None, :]) | one)[:, None]


def documents(ids: Tensor, mask: Tensor) -> Tensor:
    """Rows of several documents, each of which ends with an id below 20."""
    number = (ids < 20).cumsum(-1)
    return causal(mask) & (number[:, None, :, None] == number[:, None, None, :])


def thinned(ids: Tensor, mask: Tensor) -> Tensor:
    """Every third key before the query is hidden, by what the key and the query are."""
    return causal(mask) & (((ids[:, None, :, None] + ids[:, None, None, :]) % 3 != 0) | torch.eye(ids.shape[1], dtype=torch.bool))


class Given(Decoder):
    """Attention under a mask of pairs that is passed in; `use` says how it is spelled."""

    def __init__(self, use: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__(layers=1)
        self.places = nn.Embedding(64, 32)
        self.use = use

    def start(self, ids: Tensor) -> Tensor:
        return self.embed(ids) + self.places(torch.arange(ids.shape[1]))

    def attend(self, number: int, ids: Tensor, mask: Tensor | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        assert mask is not None
        return lambda q, k, v: self.use(q, k, v, mask)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def by_hand(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / 3).masked_fill(hidden, LOWEST).softmax(-1) @ v


def by_numbers(q: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / 3 + (1.0 - visible.to(q.dtype)) * -1e9).softmax(-1) @ v


def by_sum(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    columns = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added + -0.1 * (columns[:, None] - columns).abs())


def by_difference(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> Tensor:
    columns = torch.arange(q.shape[2])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=added - 0.1 * (columns[:, None] - columns).abs())


Form = Callable[[Tensor], Tensor]
FORMS: dict[str, tuple[Callable[..., Tensor], Form]] = {
    "bool": (by_sdpa, lambda seen: seen),
    "infinite": (by_sdpa, lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)),
    "lowest": (by_sdpa, lambda seen: torch.zeros(seen.shape).masked_fill(~seen, LOWEST)),
    "hidden": (by_hand, lambda seen: ~seen),
    "integers": (by_numbers, lambda seen: seen.long()),
    "heads": (by_sdpa, lambda seen: torch.zeros(seen.shape).masked_fill(~seen, LOWEST).expand(-1, 4, -1, -1)),
    "with a bias": (by_sum, lambda seen: torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)),
    "less a bias": (by_difference, lambda seen: torch.zeros(seen.shape).masked_fill(~seen, LOWEST)),
}
SEEN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"causal": lambda ids, mask: causal(mask), "documents": documents, "thinned": thinned}


def batch_of(make: Callable[..., Any], seen: Callable[[Tensor, Tensor], Tensor], form: Form, labels: bool = True) -> Batch:
    ids, mask, wanted = make(forest())
    inputs = {"input_ids": ids, "attention_mask": form(seen(ids, mask)), **({"labels": wanted} if labels else {})}
    return Batch("given", inputs, mask.bool(), pads=True)


def check(call: Callable[..., Any], model: nn.Module, batch: Batch) -> None:
    """Equal to the dense run, and shared as far as ids and masks agree."""
    wanted, found = compare.step(model, model, batch), compare.step(call, model, batch)
    run = sp_compile.last_run()
    assert run.shared, run.refused
    assert run.physical_tokens == trie(batch) < run.logical_tokens
    compare.assert_close(found, wanted, batch.real)


def trie(batch: Batch) -> int:
    """Tokens that differ in their row so far: ids, and the pairs of all queries up to them."""
    ids, mask = batch.tensor("input_ids"), batch.tensor("attention_mask")
    heads = mask.expand(len(ids), mask.shape[1] if mask.dim() == 4 else 1, *mask.shape[-2:])
    found = {
        (column, tuple(ids[row, : column + 1].tolist()), tuple(heads[row, :, : column + 1, : column + 1].flatten().tolist()))
        for row in range(ids.shape[0])
        for column in range(ids.shape[1])
    }
    return len(found)


@pytest.mark.parametrize("form", FORMS)
def test_given_pairs(form: str) -> None:
    """Every kind of mask goes through one compiled model."""
    torch._dynamo.reset()
    use, change = FORMS[form]
    model = spread(Given(use))
    call = compare.compiled(model, "eager")
    for seen, padded in (("causal", right_padded), ("documents", both_padded), ("thinned", right_padded)):
        check(call, model, batch_of(padded, SEEN[seen], change))
    assert sp_compile.last_run().compiles == 1


@pytest.mark.parametrize("implementation", [pytest.param("sdpa", marks=pytest.mark.slow), "eager"])
def test_given_to_a_library(implementation: str) -> None:
    """Hugging Face hands a 4-D mask on as it is."""
    torch._dynamo.reset()
    model = llama(attn_implementation=implementation)
    call = compare.compiled(model, "aot_eager")
    forms = ("bool", "lowest") if implementation == "sdpa" else ("lowest",)
    for form in forms:
        check(call, model, batch_of(right_padded, documents, FORMS[form][1]))


def test_one_mask_for_all_rows() -> None:
    torch._dynamo.reset()
    model = spread(Given(by_sdpa))
    call = compare.compiled(model, "eager")
    ids, _, _ = right_padded(star())
    size = ids.shape[1]
    seen = torch.ones(size, size, dtype=torch.bool).tril() & (torch.arange(size)[:, None] * torch.arange(size) % 5 != 3)
    for mask in (seen, seen[None, None], seen[:, torch.arange(size)][None].expand(len(ids), -1, -1)[:, None]):
        check(call, model, Batch("one", {"input_ids": ids, "attention_mask": mask | torch.eye(size, dtype=torch.bool)}, ids >= 0))


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "one later column": lambda seen: seen | torch.eye(seen.shape[-1], dtype=torch.bool).roll(1, 1).triu(1),
    "both directions": lambda seen: torch.ones_like(seen),
    "of one row": lambda seen: torch.cat([seen[:-1], torch.ones_like(seen[-1:])]),
    "transposed": lambda seen: seen.mT,
}


@pytest.mark.parametrize(("form", "wrong"), zip(("bool", "lowest", "hidden", "integers"), WRONG, strict=True))
def test_a_mask_that_shows_later_columns_runs_densely(form: str, wrong: str) -> None:
    """Whatever came before it, and without a word against masks that come after it."""
    use, change = FORMS[form]
    model = spread(Given(use))
    right = batch_of(right_padded, SEEN["causal"], change)
    bad = batch_of(right_padded, lambda ids, mask: WRONG[wrong](causal(mask)), change)
    torch._dynamo.reset()
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager", "min_sharing": 1.0})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for batch in (right, bad, right) if form in ("bool", "hidden") else (bad, right, bad):
            if batch is right:
                check(call, model, batch)
                continue
            compare.assert_close(compare.step(call, model, batch), compare.step(model, model, batch), batch.real)
            run = sp_compile.last_run()
            assert not run.shared
            assert "later columns" in run.refused[0]
    assert len([w for w in caught if "shared_prefix" in str(w.message)]) == 1


def test_a_mask_that_shows_later_columns_is_an_error_if_strict() -> None:
    torch._dynamo.reset()
    model = spread(Given(by_sdpa))
    call = compare.compiled(model, "eager")
    check(call, model, batch_of(right_padded, SEEN["causal"], FORMS["bool"][1]))
    with pytest.raises(sp_compile.CannotShare, match="later columns"):
        call(**batch_of(right_padded, lambda ids, mask: torch.ones_like(causal(mask)), FORMS["bool"][1]).inputs)


def test_what_hides_nothing_beside_the_models_own_mask() -> None:
    """A bias of pairs, made of ids and added to a causal mask of the model's own, is no mask that has to be causal."""
    torch._dynamo.reset()

    def use(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        size = q.shape[2]
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=bias.masked_fill(torch.ones(size, size, dtype=torch.bool).triu(1), -torch.inf)
        )

    model = spread(Given(use))
    call = compare.compiled(model, "eager")
    ids, _, _ = right_padded(forest())
    for scale in (0.01, 0.0):
        bias = (ids[:, None, :, None] - ids[:, None, None, :]).float() * scale
        batch = Batch("bias", {"input_ids": ids, "attention_mask": bias}, ids >= 0)
        wanted, found = compare.step(model, model, batch), compare.step(call, model, batch)
        assert sp_compile.last_run().shared
        compare.assert_close(found, wanted, batch.real)


def test_a_mask_turned_round() -> None:
    """What queries see is then what stood above the diagonal, which is one number in all rows or part of the key."""
    torch._dynamo.reset()

    def use(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=(bias + bias.mT).masked_fill(hidden, -torch.inf))

    model = spread(Given(use))
    call = compare.compiled(model, "eager")
    ids, _, _ = right_padded(forest())
    ids[:3, :9] = ids[0, :9]
    bias = torch.rand(1, 1, *[ids.shape[1]] * 2).tril().repeat(len(ids), 1, 1, 1)
    for change in (bias, bias.masked_fill(bias == 0, -0.5), bias + torch.rand(bias.shape).triu(1)):
        batch = Batch("turned", {"input_ids": ids, "attention_mask": change}, ids >= 0)
        wanted, found = compare.step(model, model, batch), compare.step(call, model, batch)
        run = sp_compile.last_run()
        assert run.physical_tokens == trie(batch)
        compare.assert_close(found, wanted, batch.real)
