"""Multi-token prediction through the forest: equal to dense, on as few tokens as rows that agree so far ahead have."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compile
from bench.models.mtp import Config, Experts, Model
from tests.e2e import compare
from tests.e2e.models import spread
from tests.e2e.scenarios import PAD, VOCABULARY

TOLERANCE = 1e-9
"""float64, and gradients that sum over all tokens."""


def rows(prompts: list[int], completions: list[list[int]], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Right-padded ids [B, L], real tokens [B, L] and the prompt's number [B]; completions of one prompt part at their first token."""
    generator = torch.Generator().manual_seed(seed)
    lines: list[list[int]] = []
    groups: list[int] = []
    for number, (prompt, lengths) in enumerate(zip(prompts, completions, strict=True)):
        start = torch.randint(1, VOCABULARY, (prompt,), generator=generator).tolist()
        for branch, length in enumerate(lengths):
            rest = torch.randint(1, VOCABULARY, (length,), generator=generator).tolist()
            lines.append([*start, *([branch + 1, *rest[1:]] if length else [])])
            groups.append(number)
    width = max(map(len, lines))
    ids = torch.tensor([line + [PAD] * (width - len(line)) for line in lines])
    real = torch.tensor([[1] * len(line) + [0] * (width - len(line)) for line in lines])
    return ids, real, torch.tensor(groups)


FORESTS = {
    "star": rows([9], [[5, 5, 5, 5]]),
    "prompts of one and two tokens": rows([1, 2, 1], [[5, 4], [3, 6, 2], [7]]),
    "nodes shorter than the depth": rows([4, 1], [[1, 1, 2], [1, 2]]),
    "rows that end within the depth": rows([6, 3], [[0, 1, 2, 8], [0, 0, 1, 9]]),
    "ragged": rows([9, 2, 12], [[5, 2, 7], [6], [3, 8, 1, 5]]),
}


def refined(ids: Tensor, real: Tensor, ahead: int) -> int:
    """Tokens of the forest refined by `ahead`, counted as distinct beginnings; the end of the real tokens is a symbol."""
    lines = [[(int(i), int(r)) if r else None for i, r in zip(line, kept, strict=True)] for line, kept in zip(ids, real, strict=True)]
    return len({(at, tuple(line[: at + ahead + 1])) for line in lines for at in range(len(line)) if line[at] is not None})


@functools.lru_cache(maxsize=1)
def models(**changes: Any) -> tuple[Model, Model, Any]:
    """The dense model, the same model again, and the compiled form of that."""
    torch._dynamo.reset()
    dense = spread(Model(Config(**{"body": "*E", "experts": 3, **changes}))).double()
    shared = copy.deepcopy(dense)
    return dense, shared, compare.compiled(shared, "eager")


def step(call: Any, model: nn.Module, ids: Tensor, **more: Any) -> tuple[list[Tensor], dict[str, Tensor]]:
    model.zero_grad(set_to_none=True)
    logits, main, extra = call(ids, **more)
    (main + extra).backward()
    return [main.detach(), extra.detach(), logits.detach()], {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


PLAIN: dict[str, Any] = {"body": "*-", "head_block": "*-"}
"""Without experts, whose load counts padding, so that it has to be computed."""


def check(forest: str, masked: bool, more: dict[str, Any] | None = None, **changes: Any) -> sp_compile.debug.account.Account:
    dense, shared, call = models(**changes)
    ids, real, groups = FORESTS[forest]
    given = {"groups": groups, "loss_mask": real, **({"attention_mask": real} if masked else {}), **(more or {})}
    before = {name: value.clone() for name, value in shared.named_buffers()}
    dense.load_state_dict(shared.state_dict())
    (wanted, wanted_gradients), (found, gradients) = step(dense, dense, ids, **given), step(call, shared, ids, **given)
    account = sp_compile.last_run()
    assert account.shared
    assert not account.unpacked
    for one, other in zip(found[:2], wanted[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)
    counted = real if masked and "E" not in dense.config.body + dense.config.head_block else torch.ones_like(real)
    kept = counted.bool()
    torch.testing.assert_close(found[2][kept], wanted[2][kept], rtol=TOLERANCE, atol=TOLERANCE)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in wanted_gradients.items():
        assert compare.relative(gradients[name], gradient, floor=1e-6) <= TOLERANCE, name
    for name, value in dense.named_buffers():
        assert torch.equal(dict(shared.named_buffers())[name], value), name
        changed = not torch.equal(before[name], value)
        assert changed == (name.endswith("load") and dense.training and not (name.startswith("predictions") and not found[1])), name
    assert account.logical_tokens == int(counted.sum())
    assert account.physical_tokens == refined(ids, counted, 0)
    assert account.refined_tokens == {d: refined(ids, counted, d) for d in account.refined_tokens}
    return account


@pytest.mark.parametrize("forest", FORESTS)  # varies fastest: one compilation serves all of them
@pytest.mark.parametrize(("depth", "masked"), [(1, True), (2, True), pytest.param(2, False, marks=pytest.mark.slow)])
def test_equals_dense(depth: int, masked: bool, forest: str) -> None:
    account = check(forest, masked, depth=depth, **(PLAIN if masked else {}))
    assert list(account.refined_tokens) == list(range(1, depth + 1))
    if forest in ("star", "ragged"):
        assert all(account.physical_tokens <= tokens < account.logical_tokens for tokens in account.refined_tokens.values())


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"detach": True, **PLAIN}, id="detached", marks=pytest.mark.slow),
        pytest.param({"per_token": True, **PLAIN}, id="per token"),
        pytest.param({"body": "*", "head_block": "-"}, id="without attention", marks=pytest.mark.slow),
        pytest.param({"depth": 1}, id="experts and masks"),
    ],
)
def test_variants_equal_dense(changes: dict[str, Any]) -> None:
    account = check("ragged", True, **changes)
    assert list(account.refined_tokens) == list(range(1, changes.get("depth", 2) + 1))


@pytest.mark.parametrize(
    ("body", "head_block", "depth"), [("C*", "C", 1), ("MC*", "*", 1), pytest.param("*G", "*M", 2, marks=pytest.mark.slow)]
)
def test_recurrences_in_the_body_and_in_the_heads(body: str, head_block: str, depth: int) -> None:
    """Heads fork their states where rows part so far ahead. transformers computes these recurrences in float32."""
    pytest.importorskip("transformers")
    torch._dynamo.reset()
    dense = spread(Model(Config(body=body, head_block=head_block, depth=depth)))
    shared = copy.deepcopy(dense)
    call = compare.compiled(shared, "eager")
    for ids, real, groups in FORESTS.values():
        given = {"groups": groups, "loss_mask": real, "attention_mask": real}
        (wanted, wanted_gradients), (found, gradients) = step(dense, dense, ids, **given), step(call, shared, ids, **given)
        account = sp_compile.last_run()
        assert account.shared
        assert not account.unpacked
        assert list(account.refined_tokens) == list(range(1, depth + 1))
        assert all(compare.relative(one, other) <= compare.LOGITS for one, other in zip(found[:2], wanted[:2], strict=True))
        floor = 1e-4 * max(float(g.norm()) for g in wanted_gradients.values())
        for name, gradient in wanted_gradients.items():
            assert compare.relative(gradients[name], gradient, floor=floor) <= compare.GRADIENTS, name


def test_switched_off_and_in_evaluation() -> None:
    account = check("ragged", True, {"predict": False}, depth=2)
    assert account.refined_tokens == {}
    dense, shared, call = models(depth=2)
    try:
        dense.eval(), shared.eval()
        ids, real, _ = FORESTS["ragged"]
        load = shared.body.layers[1].load.clone()
        with torch.no_grad():
            wanted, found = dense(ids, attention_mask=real), call(ids, attention_mask=real)
        assert sp_compile.last_run().refined_tokens == {}
        assert float(found[2]) == 0.0
        torch.testing.assert_close(found[0][real.bool()], wanted[0][real.bool()], rtol=TOLERANCE, atol=TOLERANCE)
        assert torch.equal(shared.body.layers[1].load, load)
    finally:
        dense.train(), shared.train()


def test_heads_do_not_move_the_main_logits() -> None:
    _, _, call = models(depth=2, **PLAIN)
    ids, real, _ = FORESTS["ragged"]
    with torch.no_grad():
        on, off = call(ids, attention_mask=real)[0], call(ids, attention_mask=real, predict=False)[0]
    torch.testing.assert_close(on, off, rtol=0, atol=1e-12)


def test_groupings_are_told_apart() -> None:
    """Three partitions of the rows give three losses, each the dense one."""
    dense, _, call = models(depth=2, **PLAIN)
    ids, real, groups = FORESTS["ragged"]
    found = []
    for partition in (groups, torch.arange(len(groups)), groups.clamp(max=1)):
        with torch.no_grad():
            wanted, got = dense(ids, real, real, partition)[2], call(ids, real, real, partition)[2]
        torch.testing.assert_close(got, wanted, rtol=TOLERANCE, atol=TOLERANCE)
        found.append(float(got))
    assert len({round(value, 6) for value in found}) == 3


def test_an_edited_completion_moves_no_other_row() -> None:
    _, _, call = models(depth=2)
    ids, real, _ = FORESTS["star"]
    other = ids.clone()
    other[1, 10:] = torch.randint(1, VOCABULARY, (other.shape[1] - 10,), generator=torch.Generator().manual_seed(4))
    rest = torch.zeros_like(real)
    rest[[0, 2, 3]] = 1
    with torch.no_grad():
        before, after = (call(x, rest, real, torch.arange(len(x)))[2] for x in (ids, other))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)


def test_padding_with_several_values_is_kept() -> None:
    """A token before the end reads what stands at padding, which the mask says nothing about."""
    dense, _, call = models(depth=2, **PLAIN)
    ids, real, groups = FORESTS["rows that end within the depth"]
    noisy = torch.where(real == 1, ids, torch.arange(ids.numel()).view_as(ids) % VOCABULARY)
    with torch.no_grad():
        wanted, found = dense(noisy, real, real, groups), call(noisy, real, real, groups)
    assert sp_compile.last_run().logical_tokens == ids.numel()
    for one, other in zip(found[1:], wanted[1:], strict=True):
        torch.testing.assert_close(one, other, rtol=TOLERANCE, atol=TOLERANCE)


def test_gradient_accumulation_counts_every_micro_batch_once() -> None:
    dense, shared, call = models(depth=2)
    dense.load_state_dict(shared.state_dict())
    for name in ("star", "ragged", "nodes shorter than the depth"):
        ids, real, groups = FORESTS[name]
        for run in (dense, call):
            _, main, extra = run(ids, real, real, groups)
            (main + extra).backward()
    experts = [(a, b) for a, b in zip(dense.modules(), shared.modules(), strict=True) if isinstance(a, Experts)]
    assert len(experts) == 3
    for one, other in experts:
        assert torch.equal(one.load, other.load)  # type: ignore[arg-type]
        one.balance()
        other.balance()  # type: ignore[operator]
        assert torch.equal(one.correction, other.correction)  # type: ignore[arg-type]
    for one_p, other_p in zip(dense.parameters(), shared.parameters(), strict=True):
        assert one_p.grad is None or compare.relative(other_p.grad, one_p.grad, floor=1e-6) <= TOLERANCE
