"""Ways to call a compiled model: grad modes, train and eval, optimisers, frozen weights, autocast, checkpointing, several models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from tests.e2e import compare, models, scenarios
from tests.e2e.models import Gpt, Rope, spread
from tests.e2e.scenarios import Batch


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


def gpt() -> nn.Module:
    return spread(Gpt(layers=1))


def labelled(seed: int = 0) -> Batch:
    ids, _, labels = scenarios.right_padded(scenarios.star(seed))
    return Batch("star", {"input_ids": ids, "labels": labels}, torch.ones_like(ids, dtype=torch.bool))


def padded() -> Batch:
    ids, mask, _ = scenarios.both_padded(scenarios.forest())
    return Batch("forest", {"input_ids": ids, "attention_mask": mask}, mask.bool())


def logits_of(call: Callable[..., Any], batch: Batch) -> Tensor:
    return compare.outputs(call(**batch.inputs))[0]


@pytest.mark.parametrize("mode", [torch.inference_mode, pytest.param(torch.no_grad, marks=pytest.mark.slow)])
def test_no_grad_first_then_training(mode: Callable[[], Any]) -> None:
    """What is cached for a batch in the first call must serve autograd in the second."""
    model, batch = gpt(), labelled()
    call = compare.compiled(model, "aot_eager")
    with mode():
        found = logits_of(call, batch)
        compare.assert_shared(sp_compile.last_run(), batch)
        assert not found.requires_grad
        assert compare.relative(found, logits_of(model, batch)) <= compare.LOGITS
    compare.check(call, model, batch)
    with mode():
        assert torch.equal(logits_of(call, batch), found)


def test_eval_and_train_alternate() -> None:
    model, batch = gpt(), labelled()
    model.register_module("drop", nn.Dropout(0.5))
    plain = model.forward
    model.forward = lambda input_ids, labels=None: (model.drop(plain(input_ids)[0]), None)  # type: ignore[method-assign]
    call = torch.compile(model, backend="shared_prefix", options={"inner": "eager"})
    for _ in range(2):
        model.eval()
        compare.check(call, model, batch)
        model.train()
        with pytest.warns(UserWarning, match="random numbers") if _ == 0 else _nothing():
            torch.manual_seed(0)
            logits_of(call, batch)
        assert not sp_compile.last_run().shared


class _nothing:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_optimiser_steps_between_calls(make: Callable[..., torch.optim.Optimizer]) -> None:
    model = gpt()
    dense = copy.deepcopy(model)
    call = compare.compiled(model, "eager")
    optimisers = [make(m.parameters(), lr=1e-3) for m in (model, dense)]
    for seed in range(4):
        batch = labelled(seed)
        for runs, module, optimiser in ((call, model, optimisers[0]), (dense, dense, optimisers[1])):
            compare.step(runs, module, batch)
            optimiser.step()
    assert sp_compile.last_run().compiles == 1
    batch = labelled(9)
    found, wanted = logits_of(call, batch), logits_of(dense, batch)
    assert compare.relative(found, wanted) <= 1e-4
    assert compare.relative(found, logits_of(gpt(), batch)) > 1e-2, "the steps moved the weights"


def test_frozen_parameters() -> None:
    """Frozen at first, all but one later, and then none."""
    model, batch = gpt(), labelled()
    call = compare.compiled(model, "aot_eager")
    for frozen in (("wpe", "ln_1"), ("transformer",), ()):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in frozen) or "ln_f" in name)
        compare.check(call, model, batch)


def test_autocast_on_and_off() -> None:
    """In bfloat16 the errors against float32 are those of the dense model, up to chance; all parameters count as one vector."""
    model = gpt()
    call = compare.compiled(model, "eager")

    def rounded(run: Callable[..., Any], batch: Batch) -> compare.Result:
        with torch.autocast("cpu", torch.bfloat16):
            return compare.step(run, model, batch)

    for seed in range(3):
        batch = labelled(seed)
        compare.check(call, model, batch)
        exact = compare.step(model, model, batch)
        found, wanted = rounded(call, batch), rounded(model, batch)
        compare.assert_shared(sp_compile.last_run(), batch)
        assert found.logits.dtype == wanted.logits.dtype == torch.bfloat16
        assert compare.relative(found.logits, exact.logits) <= 1.25 * compare.relative(wanted.logits, exact.logits)
        vectors = [torch.cat([g.flatten() for g in result.gradients.values()]) for result in (found, wanted, exact)]
        assert compare.relative(vectors[0], vectors[2]) <= 1.25 * compare.relative(vectors[1], vectors[2])


class Checkpointed(Gpt):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        _, t = input_ids.size()
        x = self.transformer["wte"](input_ids) + self.transformer["wpe"](torch.arange(t))
        for block in self.transformer["h"]:  # type: ignore[union-attr]
            x = checkpoint(block, x, use_reentrant=False)
        return self.lm_head(self.transformer["ln_f"](x)), None


def test_checkpointing() -> None:
    model = spread(Checkpointed())
    call = compare.compiled(model, "aot_eager")
    for seed in range(2):
        compare.check(call, model, labelled(seed))


def test_hugging_face_checkpointing() -> None:
    pytest.importorskip("transformers")
    model = models.llama(num_hidden_layers=1)
    model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    call = compare.compiled(model.train(), "aot_eager")
    compare.check(call, model, labelled())
    compare.check(call, model, labelled(1))


@pytest.mark.parametrize("training", [True, False])
def test_use_cache_at_its_default(training: bool) -> None:
    """Hugging Face returns keys and values of all layers unless told otherwise."""
    pytest.importorskip("transformers")
    model = models.llama(num_hidden_layers=1, use_cache=True).train(training)
    batch = padded()
    call = compare.compiled(model, "eager")
    compare.check(call, model, batch)
    compare.assert_shared(sp_compile.last_run(), batch)


def test_two_models_alternate() -> None:
    first, second = gpt(), spread(Gpt(layers=1, width=16, heads=2), seed=1)
    calls = [(compare.compiled(model, "eager"), model) for model in (first, second)]
    for seed in range(3):
        for call, model in calls:
            assert compare.check(call, model, labelled(seed)).compiles == 1


def test_another_backend_is_unaffected() -> None:
    """Its graphs hold nothing of this package and are the same before and after."""
    pytest.importorskip("transformers")
    graphs: list[str] = []

    def record(module: torch.fx.GraphModule, values: list[Any]) -> Callable[..., Any]:
        graphs.append(str(module.graph))
        return module.forward

    model, batch = models.llama(num_hidden_layers=1), padded()
    wanted = compare.step(model, model, batch)
    found = compare.step(torch.compile(model, backend=record), model, batch)
    compare.assert_same_bits(found, wanted)
    compare.check(compare.compiled(model, "eager"), model, batch)
    torch._dynamo.reset()
    compare.assert_same_bits(compare.step(torch.compile(model, backend=record), model, batch), wanted)
    assert len(graphs) == 2
    assert graphs[0] == graphs[1]
    assert "sp_compile" not in graphs[0]


def test_deterministic_flag_toggles() -> None:
    model, batch = spread(Rope(layers=1)), padded()
    call = compare.compiled(model, "eager")
    before = torch.are_deterministic_algorithms_enabled()
    try:
        for on in (False, True, False, True):
            torch.use_deterministic_algorithms(on)
            compare.check(call, model, batch)
            if on:
                results = [compare.step(call, model, batch) for _ in range(3)]
                for other in results[1:]:
                    compare.assert_same_bits(other, results[0])
    finally:
        torch.use_deterministic_algorithms(before)


def test_module_compile_by_name() -> None:
    """Through the entry point of the installed package, with its default options."""
    assert "shared_prefix" in torch._dynamo.list_backends()
    model, batch = gpt(), labelled()
    wanted = compare.step(model, model, batch)
    model.compile(backend="shared_prefix", options={"inner": "eager"})
    found = compare.step(model, model, batch)
    compare.assert_shared(sp_compile.last_run(), batch)
    compare.assert_close(found, wanted, batch.real)


def test_fullgraph_and_dynamic_flags() -> None:
    """The user's own flags of torch.compile."""
    batch = labelled()
    for flags in ({"fullgraph": True}, {"dynamic": True}, {"dynamic": False}):
        torch._dynamo.reset()
        model = gpt()
        call = torch.compile(model, backend="shared_prefix", options={"inner": "eager", "strict": True}, **flags)
        compare.check(call, model, batch)


def test_buffer_replaced_and_weights_loaded_between_calls() -> None:
    model = spread(Rope(layers=1))
    call = compare.compiled(model, "eager")
    compare.check(call, model, padded())
    model.frequency = model.frequency * 0.5
    compare.check(call, model, padded())
    model.load_state_dict(spread(Rope(layers=1), seed=4).state_dict())
    compare.check(call, model, padded())
