"""What looks ahead is computed on the forest refined by as many columns, where it pays and is proved, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed

from sp_compile.layout import refine
from sp_compile.layout.forest import Forest
from sp_compile.ops import refined
from tests.passes.harness import Tiny, batch, compare, rewrite, run, show

PASS = "refine_sharing"
AFTER = "share_prefixes"
TOLERANCE = 1e-10


class Ahead(Tiny):
    """A second attention layer on hidden states joined with what `look(self, hidden, ids)` makes of the tokens ahead."""

    def __init__(self, look: Callable[[Any, Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__(lambda *_: None)
        self.join = nn.Linear(16, 8, dtype=torch.float64)
        self.look = look

    def mix(self, x: Tensor) -> Tensor:
        rows, columns, size = x.shape
        q, k, v = (layer(x).view(rows, columns, 2, size // 2).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + mixed.transpose(1, 2).reshape(rows, columns, size)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.mix(self.words(ids))
        return self.head(hidden), self.head(self.mix(self.join(torch.cat(self.look(self, hidden, ids), -1))))


def rolled(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, m.words(torch.roll(ids, -1, 1))


def cut(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden[:, :-1], m.words(ids[:, 1:])


def padded(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, m.words(F.pad(ids[:, 2:], (0, 2)))


def joined(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, m.words(torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], 1))


def rolled_activations(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, torch.roll(m.words(ids), -2, 1)


def hidden_ahead(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden[:, :-2], hidden[:, 2:]


def narrowed(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    columns = ids.shape[1]
    return F.layer_norm(hidden[:, : columns - 1], (8,)), m.words(ids.narrow(1, 1, columns - 1))


def test_tokens_ahead_meet_gathered_hidden_states() -> None:
    found = rewrite(Ahead(rolled), batch())
    assert found.context.refined == [(1, 0)]
    assert_expected_inline(
        show(found.after[AFTER], "roll"),
        """\
roll = roll(l_ids_, -1, 1)
size = size(forest_row_1_0, 0)
pack_1 = pack(roll, forest_row_1_0, forest_column_1_0, forest_index_1_0, 'B L')
embedding_1 = embedding(pack_1, l_self_modules_words_parameters_weight_, None, None, 2.0, False, False)
places = places(forest_index, forest_row_1_0, forest_column_1_0, 0, False)
regather = regather(hidden, places, 'B L _')
cat = cat([regather, embedding_1], -1)
linear_4 = linear(cat, l_self_modules_join_parameters_weight_, l_self_modules_join_parameters_bias_)
linear_5 = linear(linear_4, l_self_modules_q_parameters_weight_, l_self_modules_q_parameters_bias_)
view_3 = view(linear_5, 1, size, 2, 4)
q_1 = transpose(view_3, 1, 2)
linear_6 = linear(linear_4, l_self_modules_k_parameters_weight_, l_self_modules_k_parameters_bias_)
view_4 = view(linear_6, 1, size, 2, 4)
k_1 = transpose(view_4, 1, 2)
linear_7 = linear(linear_4, l_self_modules_v_parameters_weight_, l_self_modules_v_parameters_bias_)
view_5 = view(linear_7, 1, size, 2, 4)
v_1 = transpose(view_5, 1, 2)
shared_attention_1 = shared_attention(q_1, k_1, v_1, None, None, None, None, scale=0.5, window=None, chunk=None, softcap=None)
transpose_4 = transpose(shared_attention_1, 1, 2)
contiguous_1 = contiguous(transpose_4)
transpose_5 = transpose(contiguous_1, 1, 2)
transpose_7 = transpose(transpose_5, 1, 2)
reshape_1 = reshape(transpose_7, 1, size, 8)
add_1 = add(linear_4, reshape_1)
linear_8 = linear(add_1, l_self_modules_head_parameters_weight_, l_self_modules_head_parameters_bias_)
unpack = unpack(linear_3, forest_index, 'B L _')
unpack_1 = unpack(linear_8, forest_index_1_0, 'B L _')
return [unpack, unpack_1]
""",
    )


@pytest.mark.parametrize(
    ("look", "forests"),
    [
        (rolled, [(1, 0)]),
        (cut, [(1, 1)]),
        (padded, [(2, 0)]),
        (joined, [(1, 0)]),
        (rolled_activations, [(2, 0)]),
        (hidden_ahead, [(2, 2)]),
        (narrowed, [(1, 1)]),
    ],
)
def test_numbers(look: Callable[..., Any], forests: list[tuple[int, int]]) -> None:
    error, found = compare(Ahead(look), batch())
    assert error < TOLERANCE
    assert found.context.refined == forests
    assert found.context.unpacked == []


def test_model_called_without_the_last_column() -> None:
    """As training loops do that cut inputs and labels out of one tensor."""

    def loss(logits: Tensor, ids: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Tiny(loss)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.model(tokens[:, :-1], tokens[:, 1:])  # type: ignore[no-any-return]

    error, found = compare(Loop(), batch())
    assert error < TOLERANCE
    assert found.context.refined == [(0, 1)]


# -- must not be rewritten ---------------------------------------------------------------------------------------------------------


def test_labels_stay_on_rows() -> None:
    """They are no keys of the forest, and nothing is computed for them."""

    def loss(logits: Tensor, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        picked = logits.log_softmax(-1)[:, :-1].gather(-1, labels[:, 1:, None]).squeeze(-1)
        return picked, F.cross_entropy(logits.flatten(0, 1), torch.roll(labels, -1, 1).flatten(), reduction="none")

    ids = batch()
    error, found = compare(Tiny(loss), ids, ids.clone())
    assert error < TOLERANCE
    assert found.context.refined == []
    assert len(found.context.keys) == 1


def _to_the_right(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, torch.roll(m.words(ids), 1, 1)


def _rows_rolled(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, m.words(torch.roll(ids, -1, 0))


def _flipped(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, m.words(ids.flip(1))


def _by_a_half(m: Ahead, hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return hidden, torch.roll(m.words(ids), -(ids.shape[1] // 2), 1)


@pytest.mark.parametrize("look", [_to_the_right, _rows_rolled, _flipped, _by_a_half])
def test_other_moves_are_refused(look: Callable[..., Any]) -> None:
    with pytest.raises(BackendCompilerFailed, match="cannot share"):
        run(Ahead(look), batch())


def test_switched_off_it_is_refused() -> None:
    with pytest.raises(BackendCompilerFailed, match="moves tokens"):
        run(Ahead(rolled), batch(), disable=[PASS])


# -- planted faults ----------------------------------------------------------------------------------------------------------------


def test_numbers_show_a_forest_that_is_not_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    right = refine.refined_forest
    monkeypatch.setattr("sp_compile.layout.tensors.refined_forest", lambda forest, ahead, cut: right(forest, 0, cut))
    for seed, look in ((11, rolled), (12, cut)):
        error, _ = compare(Ahead(look), batch(seed=seed))  # not a batch whose forest is known
        assert error > 1e-3


def test_numbers_show_a_wrong_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    right = refined.places
    monkeypatch.setattr(refined, "places", lambda index, row, column, offset, wraps: right(index, row, column, offset + 1, wraps))
    error, _ = compare(Ahead(rolled), batch())
    assert error > 1e-3


# -- parts -------------------------------------------------------------------------------------------------------------------------


def test_tensors_of_refined_forests() -> None:
    forest = Forest.from_rows([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6]])
    finer = forest.refined(1)
    assert forest.tensor("row@1-0", "cpu").tolist() == finer.row.tolist()
    assert forest.tensor("index@1-0", "cpu").tolist() == finer.index.tolist()
    short = forest.tensor("index@1-1", "cpu")
    assert short.shape == (3, 4)
    assert short[:, 3].tolist() == [-1] * 3
    assert len(set(short[:, :3].flatten().tolist()) - {-1}) == len(forest.tensor("column@1-1", "cpu"))
    assert int(forest.tensor("column@1-1", "cpu").max()) == 2
    assert int(forest.tensor("count@1-1", "cpu").sum()) == 9


@pytest.mark.parametrize("pattern", ["B L _", "B*L _", "B L*2 _", "B _ L"])
def test_regather_reads_rows(pattern: str) -> None:
    """Against the rows themselves."""
    forest = Forest.from_rows([[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]])
    count = forest.num_tokens
    shape = {"B L _": (1, count, 3), "B*L _": (count, 3), "B L*2 _": (1, 2 * count, 3), "B _ L": (1, 3, count)}[pattern]
    value = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    row, column = forest.tensor("row@1-0", "cpu"), forest.tensor("column@1-0", "cpu")
    where = refined.places(forest.tensor("index", "cpu"), row, column, 1, True)
    found = refined.regather(value, where, pattern)

    def by_token(x: Tensor) -> Tensor:
        return x.movedim(-1, 0) if pattern == "B _ L" else x.reshape(-1, 2, 3) if pattern == "B L*2 _" else x.reshape(-1, 3)

    wanted = [by_token(value)[forest.index[r, (c + 1) % 4]] for r, c in zip(row.tolist(), column.tolist(), strict=True)]
    assert torch.equal(by_token(found), torch.stack(wanted))
