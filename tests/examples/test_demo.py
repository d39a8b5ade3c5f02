"""The demonstration's batch, its objective, and above all that its last line can say FAILED."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("reasoning_gym")
pytest.importorskip("transformers")

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def demo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["demo"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def measured(demo: ModuleType, scale: float = 1.0, loss: float = 0.5) -> Any:
    return demo.Measured(loss, {"w": scale * torch.arange(1.0, 5.0)}, 1.0, 1.0)


def ran(**changed: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"logical_tokens": 300, "physical_tokens": 100, "sharing": 3.0, "refused": None} | changed)


def test_verdict_is_good_when_gradients_agree(demo: ModuleType) -> None:
    good, line = demo.verdict(measured(demo), measured(demo, 1 + 1e-6), ran())
    assert good
    assert line.startswith("OK: 300 logical tokens computed as 100 physical (I = 3.00), gradients agree to ")


@pytest.mark.parametrize(
    ("scale", "loss", "run", "said"),
    [
        (1.001, 0.5, ran(), "gradients differ by 1.0e-03 at w"),
        (float("nan"), 0.5, ran(), "gradients differ"),
        (1.0, 0.6, ran(), "losses differ"),
        (1.0, float("nan"), ran(), "losses differ"),
        (1.0, 0.5, None, "did not run"),
        (1.0, 0.5, ran(refused="no rule for aten.roll"), "sharing was refused: no rule for aten.roll"),
        (1.0, 0.5, ran(physical_tokens=300), "nothing was shared"),
    ],
)
def test_verdict_is_bad(demo: ModuleType, scale: float, loss: float, run: Any, said: str) -> None:
    good, line = demo.verdict(measured(demo), measured(demo, scale, loss), run)
    assert not good
    assert line.startswith("FAILED: ")
    assert said in line


def test_verdict_is_bad_when_a_gradient_is_missing(demo: ModuleType) -> None:
    whole = measured(demo)
    for less in (dataclasses.replace(whole, gradients={}), dataclasses.replace(whole, gradients=whole.gradients | {"v": torch.ones(1)})):
        assert not demo.verdict(whole, less, ran())[0]
    empty = dataclasses.replace(whole, gradients={})
    assert not demo.verdict(empty, empty, ran())[0]


def test_batch_trains_exactly_the_completions(demo: ModuleType) -> None:
    prompts, completions = [[1, 2, 3], [4]], [[[5, 65], [6]], [[66, 67, 7], [8, 68]]]
    batch = demo.build_batch(prompts, completions)
    assert batch.ids.tolist() == [[1, 2, 3, 5, 65], [1, 2, 3, 6, 256], [4, 66, 67, 7, 256], [4, 8, 68, 256, 256]]
    assert batch.mask.sum(1).tolist() == [5, 4, 4, 3]
    predicted = [batch.ids[b, 1:][batch.trained[b]].tolist() for b in range(4)]
    assert predicted == [[5, 65], [6], [66, 67, 7], [8, 68]]
    assert torch.allclose(batch.advantages.view(2, 2).sum(1), torch.zeros(2), atol=1e-5)
    assert (batch.advantages.view(2, 2)[:, 0] > 0).all()


def test_objective_is_minus_mean_advantage_at_ratio_one(demo: ModuleType) -> None:
    batch = demo.build_batch([[1], [2]], [[[65, 3], [4]], [[66], [5, 5]]])
    new = batch.old.clone().requires_grad_()
    loss = demo.objective(new, batch)
    weights = batch.trained.sum(1)
    assert torch.allclose(loss, -(batch.advantages * weights).sum() / weights.sum())
    (gradient,) = torch.autograd.grad(loss, new)
    assert (gradient[~batch.trained] == 0).all()
    assert (gradient[batch.trained] != 0).all()


def test_objective_clips_large_ratios(demo: ModuleType) -> None:
    batch = demo.build_batch([[1]], [[[65], [4]]])
    new = torch.full_like(batch.old, 1.0).requires_grad_()
    (gradient,) = torch.autograd.grad(demo.objective(new, batch), new)
    assert gradient[0].eq(0).all()
    assert gradient[1].ne(0).any()


def test_prompts_differ_and_keep_to_the_limit(demo: ModuleType) -> None:
    prompts = demo.make_prompts(demo.Sizes(), seed=0)
    assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 4
    assert all(100 < len(prompt) <= demo.Sizes().prompt_bytes for prompt in prompts)


def test_both_runs_agree_under_an_eager_backend_and_nothing_was_shared(demo: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    torch._dynamo.reset()
    sizes = demo.Sizes(layers=1, hidden=64, prompts=2, completions=4, shortest=3, longest=6, prompt_bytes=120, steps=1)
    monkeypatch.setattr(demo.sp_compile, "last_run", lambda: None, raising=False)
    good, line = demo.run_demo("eager", sizes, Console(quiet=True), dense_backend="eager")
    assert (good, line) == (False, "FAILED: the shared_prefix backend did not run")
    monkeypatch.setattr(demo.sp_compile, "last_run", lambda: ran(), raising=False)
    assert demo.run_demo("eager", sizes, Console(quiet=True), dense_backend="eager")[0]
