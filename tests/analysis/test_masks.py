"""What is read off the masks that models build themselves, by their idioms; by hand and with torch's attention function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sp_compile.analysis.masks import AttentionMask
from tests.capture.handwritten import INF, Attention, compare, merge, refusal

Mask = Callable[[Any, int, "Tensor | None"], Tensor]
LOWEST = torch.finfo(torch.float32).min
IDIOMS: dict[str, tuple[Mask, str, str, tuple[str | None, ...]]] = {}


def idiom(kind: str, structure: str, *paddings: str | None) -> Callable[[Mask], Mask]:
    """Registers a function of (model, L, mask).

    Args:
        kind: "zero" hides where the value is 0, "hidden" where it is True, "visible" where it is False, "add" is added to the scores.
        structure: what is read off the mask: "causal", "window 4", "padding", "window 4 padding", "matrix" or "alone matrix", if pads are
            seen by themselves.
        paddings: the paddings it is tried with; none means that it takes no padding mask.
    """

    def register(function: Mask) -> Mask:
        IDIOMS[function.__name__] = (function, kind, structure, paddings or (None,))
        return function

    return register


def below(n: int) -> Tensor:
    return torch.triu(torch.full((n, n), -INF), diagonal=1)


@idiom("zero", "causal")
def tril_of_ones(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.tril(torch.ones(n, n)).view(1, 1, n, n)


@idiom("zero", "causal")
def buffer(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return model.tril[:, :, :n, :n]  # type: ignore[no-any-return]


@idiom("zero", "causal")
def buffer_without_leading_dimensions(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return model.tril[0, 0, :n, :n]  # type: ignore[no-any-return]


@idiom("hidden", "causal")
def buffer_of_hidden_places(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return model.triu.bool()[:n, :n]  # type: ignore[no-any-return]


@idiom("zero", "causal")
def table_made_in_forward(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.tril(torch.ones(24, 24))[None, None, :n, :n]


@idiom("add", "causal")
def triu_of_full(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return below(n)


@idiom("add", "causal")
def joined_to_an_empty_cache(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.hstack([torch.zeros((n, 0)), below(n)]).type_as(model.slopes)


@idiom("hidden", "causal")
def boolean_triu(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


@idiom("add", "causal")
def triu_in_place(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.full((n, n), -INF).triu_(1)


@idiom("visible", "causal")
def arange_compared(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.arange(n)[:, None] >= torch.arange(n)[None, :]


@idiom("hidden", "causal")
def arange_unsqueezed(model: Any, n: int, mask: Tensor | None) -> Tensor:
    i = torch.arange(n)
    return (i.unsqueeze(1) < i.unsqueeze(0))[None, None]


@idiom("visible", "causal")
def arange_repeated(model: Any, n: int, mask: Tensor | None) -> Tensor:
    i = torch.arange(n)
    return i[None, None, :].repeat(1, n, 1) <= i[None, :, None]


@idiom("add", "causal")
def square_subsequent_mask(model: Any, n: int, mask: Tensor | None) -> Tensor:
    shown = (torch.triu(torch.ones(n, n)) == 1).transpose(0, 1)
    return shown.float().masked_fill(shown == 0, -INF).masked_fill(shown == 1, 0.0)


@idiom("add", "causal")
def masked_fill_in_place(model: Any, n: int, mask: Tensor | None) -> Tensor:
    made, i = torch.full((n, n), LOWEST), torch.arange(n)
    made.masked_fill_(i < (i + 1).view(n, 1), 0)
    return made[None, None]


@idiom("add", "causal")
def where_of_numbers(model: Any, n: int, mask: Tensor | None) -> Tensor:
    i = torch.arange(n)
    return torch.where(i[None] > i[:, None], -INF, 0.0)


@idiom("add", "causal")
def one_minus_table(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return (1 - torch.tril(torch.ones(n, n))) * -1e9


@idiom("visible", "window 4")
def window(model: Any, n: int, mask: Tensor | None) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(n)[None]
    return (i - j < 4) & (j <= i)


@idiom("visible", "window 4")
def band(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.triu(torch.tril(torch.ones(n, n, dtype=torch.bool)), -3)


@idiom("visible", "window 4 padding", "right")
def band_and_padding(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    full = torch.ones(n, n, dtype=torch.bool)
    return torch.tril(full) & ~torch.tril(full, -4) & mask.bool()[:, None, None]


@idiom("visible", "padding", "left", "right")
def causal_and_padding(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    i = torch.arange(n)
    return (i[:, None] >= i[None, :]) & mask[:, None, None, :].bool()


@idiom("hidden", "padding", "left", "right")
def hidden_or_padding(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return (torch.tril(torch.ones(n, n)) == 0)[None, None] | (mask[:, None, None, :] == 0)


@idiom("zero", "padding matrix", "left", "right")
def table_times_padding(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return torch.tril(torch.ones(n, n, dtype=torch.long))[None, None] * mask[:, None, None, :]


@idiom("visible", "padding matrix", "right")
def padding_compared_with_one(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return torch.ones(n, n, dtype=torch.bool).tril()[None, None] & (mask[:, None, None, :] == 1)


@idiom("add", "padding matrix", "left", "right")
def finite_padding_added(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return (1.0 - mask[:, None, None, :].to(torch.float64)) * -10000.0 + below(n)


@idiom("add", "padding matrix", "left", "right")
def lowest_padding_added(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    inverted = 1.0 - mask[:, None, None, :].expand(mask.shape[0], 1, n, n).to(torch.float32)
    return inverted.masked_fill(inverted.to(torch.bool), LOWEST) + torch.triu(torch.full((n, n), LOWEST), 1)


@idiom("add", "padding", "right")
def boolean_padding_added(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return (1.0 - mask[:, None, None, :].bool().to(torch.float64)) * -10000.0 + torch.triu(torch.full((n, n), -1e9), 1)


@idiom("add", "causal")
def alibi(model: Any, n: int, mask: Tensor | None) -> Tensor:
    i = torch.arange(n)
    return model.slopes[:, None, None] * (i[None, :] - i[:, None]) + below(n)  # type: ignore[no-any-return]


@idiom("add", "padding matrix", "right")
def alibi_chosen_by_where(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    i = torch.arange(n)
    return torch.where((i[:, None] >= i) & mask[:, None, None, :].bool(), model.slopes[:, None, None] * (i - i[:, None]), -INF)


@idiom("add", "causal")
def learned_distances(model: Any, n: int, mask: Tensor | None) -> Tensor:
    i = torch.arange(n)
    return model.distance((i[:, None] - i).clamp(0, 23)).permute(2, 0, 1)[None] + below(n)  # type: ignore[no-any-return]


@idiom("visible", "causal")
def diagonal_beside_what_came_before(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril(-1) | torch.eye(n, dtype=torch.bool)


@idiom("visible", "window 4")
def window_or_itself(model: Any, n: int, mask: Tensor | None) -> Tensor:
    i = torch.arange(n)
    return ((i[:, None] - i < 4) & (i <= i[:, None])) | (i[:, None] == i)


@idiom("visible", "alone matrix", "left")
def pads_see_themselves(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    return (torch.ones(n, n, dtype=torch.bool).tril() & mask[:, None, None, :].bool()) | torch.eye(n, dtype=torch.bool)


@idiom("hidden", "alone matrix", "left")
def pads_are_not_hidden_from_themselves(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1) | (mask[:, None, None, :] == 0)
    return hidden.masked_fill(torch.eye(n, dtype=torch.bool), False)


@idiom("add", "alone matrix", "left")
def diagonal_kept_by_where(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    seen = torch.arange(n)[:, None] >= torch.arange(n)
    seen = torch.where(torch.eye(n, dtype=torch.bool), True, seen & mask[:, None, None, :].bool())
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -INF)


@idiom("visible", "alone matrix", "left")
def pairs_of_real_tokens_or_itself(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    real = mask[:, None, None, :].bool() & mask[:, None, :, None].bool()
    return (torch.ones(n, n, dtype=torch.bool).tril() & real) | torch.eye(n, dtype=torch.bool)


@idiom("visible", "matrix", "right")
def chosen_for_the_whole_batch(model: Any, n: int, mask: Tensor | None) -> Tensor:
    assert mask is not None
    below = torch.ones(n, n, dtype=torch.bool).tril()[None, None]
    return torch.where(mask.bool().all(), below, below & mask[:, None, None, :].bool())


@idiom("visible", "causal")
def made_for_one_more_column(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.ones(n + 1, n + 1, dtype=torch.bool).tril()[..., :-1, :-1]


@idiom("visible", "causal")
def made_for_one_column_before(model: Any, n: int, mask: Tensor | None) -> Tensor:
    return torch.ones(n + 1, n + 1, dtype=torch.bool).tril(-1)[1:, :-1]


def by_hand(function: Mask, kind: str) -> Attention:
    def attention(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        scores, made = q @ k.transpose(-2, -1) / 2, function(model, q.shape[2], mask)
        # left padding leaves rows without a visible key, which minus infinity would turn into NaN
        hidden = -INF if mask is None else -1e9
        if kind == "add":
            scores = scores + made
        elif kind == "visible":
            scores = torch.where(made, scores, hidden)
        else:
            scores = scores.masked_fill(made == 0 if kind == "zero" else made, hidden)
        return merge(scores.softmax(-1) @ v)

    return attention


def by_torch(function: Mask, kind: str) -> Attention:
    def attention(model: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        made = function(model, q.shape[2], mask)
        made = made != 0 if kind == "zero" else ~made if kind == "hidden" else made.to(q.dtype) if kind == "add" else made
        return merge(F.scaled_dot_product_attention(q, k, v, attn_mask=made))

    return attention


def structure_of(mask: AttentionMask) -> str:
    assert mask.chunk is None
    assert mask.segments is None
    parts = [f"window {mask.window}" if mask.window else "", "padding" if mask.padding else ""]
    parts += ["alone" if mask.alone else "", "matrix" if mask.matrix else ""]
    return " ".join(filter(None, parts)) or "causal"


@pytest.mark.parametrize("name, padding", [(name, padding) for name, given in IDIOMS.items() for padding in given[3]])
def test_mask_idiom(name: str, padding: str | None) -> None:
    function, kind, structure, _ = IDIOMS[name]
    calls = compare(by_hand(function, kind), by_torch(function, kind), padding=padding)
    assert [structure_of(call.mask) for call in calls] == [structure] * 2


REFUSED: dict[str, tuple[Mask, str, str | None]] = {
    "next column visible": (lambda model, n, mask: torch.tril(torch.ones(n, n), diagonal=1), "zero", None),
    "padding only": (lambda model, n, mask: mask[:, None, None, :].bool(), "visible", "right"),  # type: ignore[index]
    "additive padding only": (lambda model, n, mask: (1.0 - mask[:, None, None, :].double()) * -1e4, "add", "right"),  # type: ignore[index]
    "prefix": (lambda model, n, mask: torch.ones(n, n, dtype=torch.bool).tril() | (torch.arange(n) < 3), "visible", None),
    "transposed": (lambda model, n, mask: torch.ones(n, n, dtype=torch.bool).tril().T, "visible", None),
    "transposed buffer": (lambda model, n, mask: model.tril[:, :, :n, :n].transpose(2, 3), "zero", None),
    "soft": (lambda model, n, mask: torch.triu(torch.full((n, n), -5.0), 1), "add", None),
    "later columns only": (lambda model, n, mask: torch.ones(n, n, dtype=torch.bool).tril(-1), "hidden", None),
    "window without causality": (lambda model, n, mask: torch.arange(n)[:, None] - torch.arange(n) < 4, "visible", None),
    "unless padded": (
        lambda model, n, mask: torch.ones(n, n, dtype=torch.bool).tril() | (mask[:, None, None, :] == 0),  # type: ignore[index]
        "visible",
        "right",
    ),
    "bias only": (lambda model, n, mask: model.slopes[:, None, None] * (torch.arange(n) - torch.arange(n)[:, None]), "add", None),
    "diagonal and above": (
        lambda model, n, mask: torch.ones(n, n, dtype=torch.bool).triu() | torch.eye(n, dtype=torch.bool),
        "visible",
        None,
    ),
    "all but itself": (lambda model, n, mask: ~torch.eye(n, dtype=torch.bool), "visible", None),
    "rows of a larger table": (lambda model, n, mask: torch.ones(n + 1, n + 1, dtype=torch.bool).tril()[1:, :-1], "visible", None),
    "exchanged bias": (lambda model, n, mask: torch.where(torch.ones(n, n, dtype=torch.bool).tril(), -INF, 0.0), "add", None),
}


@pytest.mark.parametrize("how", [by_hand, by_torch])
@pytest.mark.parametrize("name", REFUSED)
def test_mask_refused(name: str, how: Callable[[Mask, str], Attention]) -> None:
    function, kind, padding = REFUSED[name]
    assert "Only causal attention can be shared" in refusal(how(function, kind), padding)
