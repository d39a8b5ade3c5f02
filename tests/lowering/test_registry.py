"""Choosing an implementation: order, user lists, determinism, reasons."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sp_compile.errors import InvalidOption, NoImplementation, StageError
from sp_compile.lowering import attention as attention_table
from sp_compile.lowering import registry
from sp_compile.lowering import rows as rows_tables
from sp_compile.lowering.registry import Implementation, bind, call, select
from tests.ops.forests import random_forest, tensors

OP = torch.ops.aten.relu.default


def implementation(name: str, reason: str | None = None, deterministic: bool = True) -> Implementation:
    return Implementation(name, OP, lambda arguments: reason, deterministic)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_TABLES", {})
    registry.register(OP, implementation("big", "needs more"), implementation("fast", deterministic=False), implementation("plain"))


@pytest.mark.usefixtures("table")
def test_first_that_supports_is_chosen_and_the_others_say_why() -> None:
    choice = select(OP, {}, deterministic=False)
    assert choice.implementation.name == "fast"
    assert choice.rejected == (("big", "needs more"),)


@pytest.mark.usefixtures("table")
def test_determinism_restricts_the_choice() -> None:
    assert select(OP, {}, deterministic=True).implementation.name == "plain"
    before = torch.are_deterministic_algorithms_enabled()
    try:
        torch.use_deterministic_algorithms(True)
        assert select(OP, {}).implementation.name == "plain"
        torch.use_deterministic_algorithms(False)
        assert select(OP, {}).implementation.name == "fast"
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("table")
def test_user_list_decides_order() -> None:
    assert select(OP, {}, names=["plain", "fast"], deterministic=False).implementation.name == "plain"
    with pytest.raises(InvalidOption, match=r"kernels\['relu'\].*big, fast, plain; got quick"):
        select(OP, {}, names=["quick"])


@pytest.mark.usefixtures("table")
def test_no_implementation_lists_every_reason() -> None:
    with pytest.raises(NoImplementation, match="big: needs more; fast: not deterministic"):
        select(OP, {}, names=["big", "fast"], deterministic=True)
    with pytest.raises(NoImplementation, match="no table"):
        select(torch.ops.aten.abs.default, {})


@pytest.mark.usefixtures("table")
def test_second_table_and_repeated_names_are_refused() -> None:
    with pytest.raises(StageError, match="table already"):
        registry.register(OP, implementation("other"))
    with pytest.raises(StageError, match="must differ"):
        registry.register(torch.ops.aten.abs.default, implementation("a"), implementation("a"))


def attention_call() -> tuple[tuple[Any, ...], dict[str, Any]]:
    end, column, _ = tensors(random_forest(0))
    with FakeTensorMode():
        q, k, v = torch.empty(1, 4, len(end), 8), torch.empty(1, 2, len(end), 8), torch.empty(1, 2, len(end), 8)
    return (q, k, v, end, column, None, None, None, None), {"scale": 0.5, "window": None, "chunk": None, "softcap": None}


def test_attention_on_cpu_gets_chains_with_its_passes() -> None:
    semantic = torch.ops.sp_compile.attention.default
    args, kwargs = attention_call()
    bound = bind(semantic, args, kwargs)
    choice = select(semantic, bound).implementation
    assert (choice.name, choice.forest_tensors, choice.output) == ("chains", ("attention_passes",), 0)
    new_args, new_kwargs = call(choice, semantic, bound, {"attention_passes": "passes"})
    assert new_args == (*args, "passes")
    assert new_kwargs == kwargs


def test_arguments_must_fit_the_schema() -> None:
    semantic = torch.ops.sp_compile.attention.default
    args, kwargs = attention_call()
    with pytest.raises(StageError, match="lacks softcap"):
        bind(semantic, args, {name: value for name, value in kwargs.items() if name != "softcap"})
    with pytest.raises(StageError, match="do not fit"):
        bind(semantic, args, kwargs | {"dropout": 0.1})


def test_attention_elsewhere_gets_blocked() -> None:
    semantic = torch.ops.sp_compile.attention.default
    args, kwargs = attention_call()
    q = torch.empty(1, 4, 8, 8, device="meta")
    choice = select(semantic, bind(semantic, (q, *args[1:]), kwargs))
    assert choice.implementation.name == "blocked"
    assert dict(choice.rejected) == {
        "chains": "runs on cpu, the tensors are on meta",
        **dict.fromkeys(
            ("fa4_auto", "fa4_auto_ordered", "fa4_blocks", "fa4_ordered", "fa4_mixed", "fa4_chains", "triton", "chains_cuda"),
            "runs on NVIDIA GPUs, the tensors are on meta",
        ),
    }
    strange = torch.empty(1, 4, 8, 8, device="meta", dtype=torch.float8_e4m3fn)
    assert select(semantic, bind(semantic, (strange, *args[1:]), kwargs)).implementation.name == "reference"


def test_every_table_ends_with_something_that_runs_anywhere() -> None:
    assert attention_table.TABLE[-1].name == "reference"
    assert rows_tables.rows is not None
    assert {registry.option_name(op) for op in registry.semantic_ops()} >= {"attention", "unpack", "take_tokens", "cross_entropy_rows"}
    for op in registry.semantic_ops():
        last = registry.implementations(op)[-1]
        assert last.supports({}) is None
        assert last.deterministic
