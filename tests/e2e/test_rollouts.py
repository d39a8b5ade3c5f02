"""Log-probabilities, losses and isolation of rollouts: what goes wrong first in systems that share prefixes by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.layout import Forest
from tests.e2e.compare import GRADIENTS, LOGITS, relative
from tests.e2e.models import VOCABULARY, gpt, llama, rope
from tests.e2e.scenarios import Row, both_padded, right_padded, star, tree

MODELS: dict[str, Callable[[], nn.Module]] = {"llama": llama, "rope": rope}


class Step(nn.Module):
    """Log-probabilities of every next token, [B, L - 1]."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        out = self.model(input_ids=input_ids, attention_mask=attention_mask)
        logits = (out["logits"] if isinstance(out, dict) else out.logits)[:, :-1].float()
        return torch.log_softmax(logits, -1).gather(-1, input_ids[:, 1:, None]).squeeze(-1)


@pytest.fixture(scope="module", params=MODELS)
def step(request: pytest.FixtureRequest) -> tuple[Step, Any]:
    torch._dynamo.reset()
    model = Step(MODELS[request.param]())
    return model, torch.compile(model, backend=shared_prefix, options={"inner": "eager", "strict": True, "min_sharing": 1.0})


def dense_and_shared(step: tuple[Step, Any], ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    model, call = step
    found = call(ids, mask)
    assert sp_compile.last_run().shared
    return model(ids, mask), found


def gradients(model: nn.Module, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_equal_gradients(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    whole = max(float(g.norm()) for g in wanted.values())
    assert all(relative(found[name], g, floor=1e-4 * whole) <= GRADIENTS for name, g in wanted.items())


def real_targets(mask: Tensor) -> Tensor:
    """bool [B, L - 1]: positions whose next token is a real one, and which are real themselves."""
    return mask[:, :-1].bool() & mask[:, 1:].bool()


def rows_of_nodes() -> list[Row]:
    """Three rows that pass through one, two and three nodes."""
    return [([5, 6, 7], []), ([5, 6, 7, 8, 9], []), ([5, 6, 7, 8, 9, 10, 11], [])]


def test_rows_of_one_two_and_three_nodes(step: tuple[Step, Any]) -> None:
    """Each row has one value per next token and none after its last."""
    ids, mask, _ = right_padded(rows_of_nodes())
    assert Forest.from_tokens(ids, keep=mask.bool()).num_nodes == 3
    wanted, found = dense_and_shared(step, ids, mask)
    counted = real_targets(mask)
    assert counted.sum(1).tolist() == [2, 4, 6]
    assert relative(found[counted], wanted[counted]) <= LOGITS
    assert sp_compile.last_run().physical_tokens == 7


@pytest.mark.parametrize("groups", [(1, 7), (1,), (2, 1, 3)])
def test_groups_of_any_size(step: tuple[Step, Any], groups: tuple[int, ...]) -> None:
    rows = [row for seed, size in enumerate(groups) for row in star(seed=seed + 1, rows=size, prompt=4 + seed, completion=3 + seed)]
    if len(rows) == 1:
        rows.append(([3, 4], []))  # a second row that shares nothing
    ids, mask, _ = both_padded(rows)
    wanted, found = dense_and_shared(step, ids, mask)
    counted = real_targets(mask)
    assert relative(found[counted], wanted[counted]) <= LOGITS


def token_mean(values: Tensor, counted: Tensor) -> Tensor:
    return (values * counted).sum() / counted.sum()


def sequence_mean(values: Tensor, counted: Tensor) -> Tensor:
    return ((values * counted).sum(1) / counted.sum(1).clamp(min=1)).mean()


def group_mean(values: Tensor, counted: Tensor) -> Tensor:
    groups = torch.arange(len(values)) // 2
    total = torch.zeros(int(groups[-1]) + 1).index_add(0, groups, (values * counted).sum(1))
    return (total / torch.zeros_like(total).index_add(0, groups, counted.sum(1).float()).clamp(min=1)).mean()


def constant_length(values: Tensor, counted: Tensor) -> Tensor:
    return (values * counted).sum() / 32


@pytest.mark.parametrize("reduce", [token_mean, sequence_mean, group_mean, constant_length], ids=lambda f: f.__name__)
def test_reductions(step: tuple[Step, Any], reduce: Callable[[Tensor, Tensor], Tensor]) -> None:
    ids, mask, _ = right_padded(tree())
    counted = real_targets(mask)
    wanted, found = dense_and_shared(step, ids, mask)
    ours, dense = reduce(found, counted), reduce(wanted, counted)
    torch.testing.assert_close(ours, dense, rtol=1e-5, atol=1e-6)
    assert_equal_gradients(gradients(step[0], ours), gradients(step[0], dense))


def test_first_completion_token_has_the_dense_gradient(step: tuple[Step, Any]) -> None:
    """Its logits stand at the last token of the prompt, which all rows share."""
    ids, mask, _ = right_padded(star(rows=4, prompt=6, completion=4))
    wanted, found = dense_and_shared(step, ids, mask)
    weight = torch.tensor([1.0, -2.0, 0.5, 3.0])
    assert_equal_gradients(gradients(step[0], (found[:, 5] * weight).sum()), gradients(step[0], (wanted[:, 5] * weight).sum()))


def test_an_edited_completion_moves_no_other_row(step: tuple[Step, Any]) -> None:
    ids, mask, _ = right_padded(star(rows=4, prompt=6, completion=5))
    call = step[1]
    before = call(ids, mask).detach()
    edited = ids.clone()
    edited[2, 8] = edited[2, 8] % 90 + 1
    after = call(edited, mask).detach()
    others = [0, 1, 3]
    assert torch.equal(after[others], before[others]), "equal numbers of tokens, so equal bits"
    assert torch.equal(after[2, :7], before[2, :7])
    assert not torch.allclose(after[2, 7:], before[2, 7:])


def test_an_edited_prompt_moves_every_row(step: tuple[Step, Any]) -> None:
    ids, mask, _ = right_padded(star(rows=4, prompt=6, completion=5))
    call = step[1]
    before = call(ids, mask).detach()
    edited = ids.clone()
    edited[:, 2] = edited[:, 2] % 90 + 1
    after = call(edited, mask).detach()
    assert all(not torch.allclose(after[row, 6:], before[row, 6:]) for row in range(4))


def test_ragged_left_padding_keeps_every_completion(step: tuple[Step, Any]) -> None:
    rows = [*star(seed=1, rows=3, prompt=9, completion=4), *star(seed=2, rows=3, prompt=3, completion=4)]
    ids, mask, labels = both_padded(rows)
    wanted, found = dense_and_shared(step, ids, mask)
    completions = labels[:, 1:] != -100
    assert completions.sum(1).tolist() == [4] * 6
    assert relative(found[completions], wanted[completions]) <= LOGITS


def test_shuffled_rows_are_followed(step: tuple[Step, Any]) -> None:
    ids, mask, _ = right_padded(tree())
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(1))
    first = step[1](ids, mask)
    second = step[1](ids[order], mask[order])
    counted = real_targets(mask)[order]
    assert relative(second[counted].detach(), first[order][counted].detach()) <= LOGITS


def test_only_padding(step: tuple[Step, Any]) -> None:
    """No token is real: the call runs, and gradients are zero or the dense run's."""
    ids, mask = torch.zeros(3, 5, dtype=torch.int64), torch.zeros(3, 5, dtype=torch.int64)
    found = step[1](ids, mask)
    assert bool(found.isfinite().all())
    loss = (found * real_targets(mask)).sum()
    assert all(not bool(g.any()) for g in gradients(step[0], loss).values())


def test_no_rows() -> None:
    """An empty micro-batch of a rank runs, forward and backward."""
    torch._dynamo.reset()
    model = gpt()
    call = torch.compile(model, backend=shared_prefix, options={"inner": "aot_eager", "strict": True})
    for rows in (3, 0, 3):
        ids = torch.ones(rows, 5, dtype=torch.int64)
        logits, _ = call(ids)
        assert logits.shape == (rows, 5, VOCABULARY)
        assert any(bool(g.any()) for g in gradients(model, logits.sum()).values()) == bool(rows)


def test_planning_again_gives_the_identical_forest() -> None:
    ids, mask, _ = both_padded([*star(seed=1, rows=3), *tree(seed=2)])
    plans = [Forest.from_tokens(ids.clone(), keep=mask.bool()) for _ in range(3)]
    assert all(plan == plans[0] and plan.key() == plans[0].key() for plan in plans)
    assert all((plan.index == plans[0].index).all() for plan in plans)


@pytest.mark.parametrize("columns", [1, 2, 127, 128, 129])
def test_lengths_around_blocks(step: tuple[Step, Any], columns: int) -> None:
    generator = torch.Generator().manual_seed(columns)
    ids = torch.randint(1, 90, (3, columns), generator=generator)
    ids[:, : columns // 2] = ids[0, : columns // 2]
    mask = torch.ones_like(ids)
    wanted, found = step[0](ids, mask), step[1](ids, mask)
    assert found.shape == wanted.shape == (3, columns - 1)
    assert relative(found, wanted) <= LOGITS
