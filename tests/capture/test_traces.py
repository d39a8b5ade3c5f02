"""What is switched on for a trace is off again after it, and a model whose arguments tell rows and columns is traced once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config
from torch import Tensor

import sp_compile
import sp_compile.backend
from tests.e2e.models import Rope, spread
from tests.e2e.scenarios import VOCABULARY

MARKS = ("_dynamo_weak_dynamic_indices", "_dynamo_dynamic_indices", "_has_dynamo_dim_marking")


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of inputs of every capture."""
    seen: list[int] = []
    decide = sp_compile.backend.ensure_symbolic

    def counted(graph: torch.fx.Graph, values: Any, **more: Any) -> bool:
        seen.append(len(values))
        return decide(graph, values, **more)

    monkeypatch.setattr(sp_compile.backend, "ensure_symbolic", counted)
    torch._dynamo.reset()
    return seen


def settings() -> tuple[Any, ...]:
    dynamo = torch._dynamo.config
    return (
        dynamo.fake_tensor_cache_enabled,
        dynamo.capture_dynamic_output_shape_ops,
        fx_config.use_duck_shape,
        torch.compiler.config.dynamic_sources,
    )


def batch() -> tuple[Tensor, Tensor]:
    ids = torch.randint(1, VOCABULARY, (1, 11), generator=torch.Generator().manual_seed(0)).repeat(4, 1)
    ids[:, 7:] = torch.randint(1, VOCABULARY, (4, 4), generator=torch.Generator().manual_seed(1))
    return ids, torch.ones_like(ids)


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    made: Callable[..., Any] = torch.compile(call, backend=sp_compile.backend.shared_prefix, options={"inner": "eager", "strict": True})
    return made


class Trainer:
    """Keeps the batch to itself."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def positional(self, ids: Tensor, mask: Tensor) -> Any:
        return self.model(ids, mask)

    def nested(self, batch: dict[str, Any]) -> Any:
        return self.model(*batch["tokens"])

    def kept(self) -> Any:
        return self.model(*self.batch)

    batch = batch()


@pytest.mark.parametrize(("how", "traces"), [("positional", 1), ("nested", 1), ("kept", 2)])
def test_arguments_that_tell_rows_and_columns_save_a_trace(how: str, traces: int, captures: list[int]) -> None:
    trainer = Trainer(spread(Rope(width=16, heads=2, groups=1, layers=1)))
    ids, mask = trainer.batch = batch()
    given: dict[str, tuple[Any, ...]] = {"positional": (ids, mask), "nested": ({"tokens": (ids, mask)},), "kept": ()}
    before = settings()
    compiled(getattr(trainer, how))(*given[how])
    assert sp_compile.last_run().shared
    assert len(captures) == traces
    assert settings() == before
    assert not any(hasattr(tensor, mark) for tensor in (ids, mask) for mark in MARKS)


class Holding(torch.nn.Module):
    """A module whose batch is an attribute; the table beside it is none."""

    def __init__(self) -> None:
        super().__init__()
        self.model = spread(Rope(width=16, heads=2, groups=1, layers=1))
        self.register_buffer("table", torch.arange(44).reshape(4, 11))
        self.tokens: dict[str, Tensor] = {}

    def forward(self) -> Any:
        return self.model(self.tokens["ids"], self.tokens["mask"])["logits"] + self.table.sum() * 0


def test_a_batch_that_the_module_holds_is_found(captures: list[int]) -> None:
    model = Holding()
    call = compiled(model)
    for seed in range(2):
        ids, mask = batch()
        model.tokens = {"ids": (ids + seed) % VOCABULARY, "mask": mask}
        torch.testing.assert_close(call(), model(), rtol=1e-5, atol=1e-5)
        assert sp_compile.last_run().shared
    assert len(captures) == 2, "one trace with numbers, and one with symbols for all batches"


def test_inputs_of_several_shapes_are_not_guessed_at(captures: list[int]) -> None:
    model = spread(Rope(width=16, heads=2, groups=1, layers=1))

    def with_another(ids: Tensor, mask: Tensor, other: Tensor) -> Any:
        return model(ids, mask), other + 1

    compiled(with_another)(*batch(), torch.ones(3, 5, dtype=torch.long))
    assert sp_compile.last_run().shared
    assert len(captures) == 2


def test_a_trace_that_fails_leaves_nothing_behind() -> None:
    torch._dynamo.reset()
    ids, mask = batch()
    before = settings()

    def broken(ids: Tensor, mask: Tensor) -> Tensor:
        raise ZeroDivisionError("of the model")

    with pytest.raises(ZeroDivisionError, match="of the model"):
        compiled(broken)(ids, mask)
    assert settings() == before
    assert not any(hasattr(tensor, mark) for tensor in (ids, mask) for mark in MARKS)


def test_marks_of_the_user_stay() -> None:
    torch._dynamo.reset()
    model = spread(Rope(width=16, heads=2, groups=1, layers=1))
    ids, mask = batch()
    torch._dynamo.mark_dynamic(ids, 0)
    compiled(model)(ids, mask)
    assert sp_compile.last_run().shared
    assert ids._dynamo_dynamic_indices == {0}  # type: ignore[attr-defined]
    assert 1 not in getattr(ids, "_dynamo_weak_dynamic_indices", set())


def test_other_backends_trace_as_ever() -> None:
    torch._dynamo.reset()
    seen: list[Any] = []

    def other(module: torch.fx.GraphModule, values: Any) -> Any:
        seen.extend(settings())
        seen.append([node.meta["example_value"].shape for node in module.graph.nodes if node.op == "placeholder"])
        return module

    before = settings()
    torch.compile(lambda ids: ids + 1, backend=other)(batch()[0])
    assert seen == [*before, [torch.Size([4, 11])]]
