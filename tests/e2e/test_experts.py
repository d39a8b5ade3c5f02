"""Hugging Face mixtures of experts with router logits and auxiliary loss: equal to dense, shared, and rows kept apart."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sp_compile
from tests.e2e import compare, scenarios
from tests.e2e.models import _TINY, spread
from tests.e2e.scenarios import VOCABULARY, Batch

transformers = pytest.importorskip("transformers")

_MANY = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_DEEPSEEK = {**_MANY, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_LATENT = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
_LATENT["num_key_value_heads"] = 4
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {**_MANY, "num_experts": 4, "head_dim": 16, "norm_topk_prob": True},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": None},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "DeepseekV3": {**_DEEPSEEK, **_LATENT},
    "Glm4Moe": {**_DEEPSEEK, "head_dim": 16},
}
QUICK = {"DeepseekV3"}
COUNTS = set(FAMILIES) - {"DeepseekV3", "Glm4Moe"}
"""Families with an auxiliary loss. It multiplies what pads give by zero, so that padding is dropped although it sums over all tokens."""


def family(name: str, experts: str = "grouped_mm") -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**{**_TINY, "output_router_logits": True, **FAMILIES[name]})
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.set_experts_implementation(experts)
    return spread(model)


def batch(kind: str) -> Batch:
    rows = scenarios.star() if kind == "star" else scenarios.forest()
    placed = scenarios.both_padded if kind == "both-padded" else scenarios.right_padded
    ids, mask, labels = placed(rows)
    return Batch(kind, {"input_ids": ids, "attention_mask": mask, "labels": labels}, mask.bool())


# Before 5.24 the library's own CPU form of the grouped product cannot be traced with symbolic sizes, densely neither.
INNER = "aot_eager" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "eager"


@functools.lru_cache(maxsize=1)
def compiled(name: str, experts: str) -> tuple[nn.Module, Any]:
    torch._dynamo.reset()
    model = family(name, experts)
    return model, compare.compiled(model, INNER)


def step(call: Callable[..., Any], model: nn.Module, given: Batch) -> tuple[compare.Result, list[Tensor]]:
    """A training step whose objective has the router logits in it, too; and auxiliary loss and router logits."""
    model.zero_grad(set_to_none=True)
    out = call(**given.inputs)
    routers = [logits.view(*given.real.shape, -1) for logits in getattr(out, "router_logits", None) or ()]
    objective = (out.logits * compare.weighting(out.logits.shape, given.real)).sum() + (3 * out.loss if out.loss is not None else 0)
    for number, logits in enumerate(routers):
        objective = objective + (logits * compare.weighting(logits.shape, given.real, seed=number)).sum()
    objective.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    more = [*([out.aux_loss.detach()] if getattr(out, "aux_loss", None) is not None else []), *(r.detach()[given.real] for r in routers)]
    return compare.Result(out.logits.detach(), None if out.loss is None else out.loss.detach(), gradients), more


CASES = [
    pytest.param(name, kind, id=f"{name}-{kind}", marks=() if name in QUICK else pytest.mark.slow)
    for name in FAMILIES
    for kind in ("star", "forest", "both-padded")
    if (name, kind) != ("GptOss", "both-padded")  # its pads in front see every key, see test_edges
]


@pytest.mark.parametrize("name, kind", CASES)
def test_family_equals_dense(name: str, kind: str) -> None:
    model, call = compiled(name, "grouped_mm")
    given = batch(kind)
    (wanted, wanted_more), (found, found_more) = step(model, model, given), step(call, model, given)
    account = sp_compile.last_run()
    compare.assert_shared(account, given)
    assert account.compiles <= 1
    assert not account.unpacked, "sums over tokens read tokens"
    compare.assert_close(found, wanted, given.real)
    assert len(found_more) == len(wanted_more), "auxiliary loss and router logits"
    assert len(found_more) == 3 or name not in COUNTS, "of every layer of experts; other families return them in newer versions only"
    for one, other in zip(found_more, wanted_more, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=5e-6 if one.dim() else 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_other_rows_do_not_see_a_change(experts: str) -> None:
    """Also not by way of the experts that the changed tokens fill."""
    _, call = compiled("Mixtral", experts)
    given = batch("star")
    ids = given.tensor("input_ids").clone()
    ids[1, 12:] = torch.randint(1, VOCABULARY, (5,), generator=torch.Generator().manual_seed(9))
    with torch.no_grad():
        before = call(**given.inputs)
        assert sp_compile.last_run().shared
        after = call(**{**given.inputs, "input_ids": ids})
    others = [0, 2, 3]
    torch.testing.assert_close(after.logits[others], before.logits[others], rtol=0, atol=2e-6)
    assert not torch.allclose(after.logits[1, 12:], before.logits[1, 12:], atol=1e-2)
    assert not torch.equal(after.aux_loss, before.aux_loss)
