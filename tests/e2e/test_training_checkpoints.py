"""Activation checkpoints in training: reentrant or not, with a policy per op, and with the hooks that adapter libraries add."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sp_compile.capture import install
from tests.e2e import compare, models
from tests.e2e.models import Gpt, spread
from tests.e2e.test_modes import labelled, padded
from tests.e2e.training_parts import with_adapters


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


class Checkpointed(Gpt):
    how: dict[str, Any]

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.transformer["wte"](input_ids) + self.transformer["wpe"](torch.arange(input_ids.size(1)))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = checkpoint(block, x, **self.how)
        return self.lm_head(self.transformer["ln_f"](x)), None


def checkpointed(**how: Any) -> nn.Module:
    model = spread(Checkpointed(width=16, heads=2, layers=1))
    model.how = how  # type: ignore[assignment]
    return model


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_reentrant(inner: str) -> None:
    model = checkpointed(use_reentrant=True)
    call = compare.compiled(model, inner)
    for seed in range(2):
        compare.check(call, model, labelled(seed))


@pytest.mark.slow
def test_hugging_face_reentrant() -> None:
    pytest.importorskip("transformers")
    model = models.llama(num_hidden_layers=2).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})  # type: ignore[operator]
    call = compare.compiled(model, "aot_eager")
    compare.check(call, model, labelled())
    model.gradient_checkpointing_disable()  # type: ignore[operator]
    compare.check(call, model, padded())


ASKED: list[str] = []


def keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    ASKED.append(str(op))
    kept = op in (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def product_contexts() -> Any:
    return create_selective_checkpoint_contexts(keep_products)


nothing_kept = functools.partial(create_selective_checkpoint_contexts, [])
attention_kept = functools.partial(
    create_selective_checkpoint_contexts, [torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]
)


class Count(TorchDispatchMode):
    def __init__(self, part: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part, self.calls = part, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += self.part in str(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_selective(inner: str) -> None:
    ASKED.clear()
    model = checkpointed(use_reentrant=False, context_fn=product_contexts)
    call = compare.compiled(model, inner)
    compare.check(call, model, labelled())
    ASKED.clear()
    torch._dynamo.reset()
    compare.step(compare.compiled(model, inner), model, labelled(1))
    assert any("addmm" in op for op in ASKED)
    assert any("sp_compile.attention" in op for op in ASKED), "the policy sees the op that runs"
    compare.check(call, model, labelled(1))


@pytest.mark.parametrize(("policy", "part", "expected"), [
    (nothing_kept, "addmm", "recomputed"),
    (product_contexts, "addmm", "kept"),
    (nothing_kept, "attention_chains.default", "recomputed"),
    (attention_kept, "attention_chains.default", "kept"),
])  # fmt: skip
def test_selective_keeps_the_policy(policy: Callable[[], Any], part: str, expected: str) -> None:
    """What the policy saves is not run again in backward; a policy that names torch's attention means this package's too."""
    model = checkpointed(use_reentrant=False, context_fn=policy)
    call = compare.compiled(model, "aot_eager")
    compare.check(call, model, labelled())
    logits, _ = call(**labelled().inputs)
    with Count(part) as count:
        logits.square().mean().backward()
    assert (count.calls > 0) == (expected == "recomputed"), count.calls


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_adapters_with_input_hooks(reentrant: bool) -> None:
    """transformers makes the frozen embedding's output require grad by a hook, for reentrant checkpoints."""
    pytest.importorskip("transformers")
    model = with_adapters(models.llama(num_hidden_layers=1)).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})  # type: ignore[operator]
    model.enable_input_require_grads()  # type: ignore[operator]
    install()  # the reset above forgot the callback that looks for hooks before each trace
    call = compare.compiled(model, "aot_eager")
    for seed in range(2):
        compare.check(call, model, labelled(seed))


def test_input_hooks_of_peft() -> None:
    peft = pytest.importorskip("peft")
    pytest.importorskip("transformers")
    base = models.llama(num_hidden_layers=1)
    base.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    install()
    compare.check(compare.compiled(model, "aot_eager"), model, labelled())
