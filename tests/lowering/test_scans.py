"""The tables of the convolution and of the scans: what is chosen, and which forest tensors it gets."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from sp_compile.errors import NoImplementation
from sp_compile.layout.chunks import chunk_tensor_name
from sp_compile.layout.tensors import symbolic_shape
from sp_compile.lowering import scans
from sp_compile.lowering.registry import Implementation, bind, call, implementations, select
from sp_compile.ops.ssd_scan import ssd_scan_inputs
from sp_compile.passes.metadata import Shapes
from sp_compile.passes.stage import Input, Source

SSD = torch.ops.sp_compile.ssd_scan.default
assert scans.EXACT == 64, "the names below"


def ssd_call(dtype: torch.dtype = torch.float32, device: str = "cpu", **options: Any) -> dict[str, Any]:
    prev = torch.arange(5) - 1
    with FakeTensorMode():
        inputs = [
            None if value is None else torch.empty(value.shape, dtype=dtype if value.is_floating_point() else value.dtype, device=device)
            for value in ssd_scan_inputs(prev, prev)
        ]
    return bind(SSD, inputs, {"dt_softplus": True, "dt_min": 0.0, "dt_max": torch.inf} | options)


@pytest.mark.parametrize(
    ("options", "names", "chosen", "tensors"),
    [
        ({}, None, "chunked", ("chunks_exact_64",)),
        ({"chunk": 256}, None, "chunked", ("chunks_exact_64",)),
        ({"chunk": 256}, ["chunked_replay"], "chunked_replay", ("chunks_replay_256",)),
        ({}, ["chunked_replay"], "chunked_replay", ("chunks_replay_64",)),
        ({}, ["reference"], "reference", ()),
    ],
)
def test_ssd_scan_gets_the_chunks_that_its_options_name(options: Any, names: Any, chosen: str, tensors: tuple[str, ...]) -> None:
    bound = ssd_call(**options)
    item = select(SSD, bound, names=names).implementation
    assert item.name == chosen
    assert item.forest_names(bound) == tensors
    args, kwargs = call(item, SSD, bound, {name: name for name in tensors})
    assert args[11:] == tensors
    assert kwargs == {"dt_softplus": True, "dt_min": 0.0, "dt_max": torch.inf, "chunk": options.get("chunk", 64)}
    for name in tensors:
        assert symbolic_shape(name) == ((name, 1 + int(name.split("_")[-1])), torch.int64)


def test_chunks_have_a_fake_whose_number_is_a_size_of_its_own() -> None:
    """What the compiler's last pass makes of the graph input, and what the op makes of that: no guard on the number of chunks or tokens."""
    shapes = Shapes(SimpleNamespace(fakes=[], symbols=None))  # type: ignore[arg-type]
    chunks = shapes.value(Input(Source.FOREST, chunk_tensor_name("exact", 64)))
    other = shapes.value(Input(Source.FOREST, chunk_tensor_name("replay", 64)))
    prev, end = (shapes.value(Input(Source.FOREST, name)) for name in ("prev", "end"))
    sizes = {str(value.shape[0].node.expr) for value in (chunks, other, prev)}
    assert len(sizes) == 3
    assert (chunks.shape[1], chunks.dtype) == (65, torch.int64)
    tokens = prev.shape[0]
    with shapes.mode:
        x, dt, B = torch.empty(1, tokens, 4, 6), torch.empty(1, tokens, 4), torch.empty(1, tokens, 2, 5)
        out, states = torch.ops.sp_compile.ssd_scan_chunked(
            x, dt, torch.empty(4), B, B, None, None, prev, end, None, None, chunks, dt_softplus=True, dt_min=0.0, dt_max=torch.inf
        )
    assert out.shape == x.shape
    assert states.shape == (0, 4, 6, 5)
    assert not shapes.env.guards


def test_plain_torch_code_runs_on_any_device() -> None:
    assert select(SSD, ssd_call(device="meta")).implementation.name == "chunked"


def test_untested_dtype_is_left_to_the_reference() -> None:
    choice = select(SSD, ssd_call(dtype=torch.float8_e4m3fn))
    assert choice.implementation.name == "reference"
    assert "float8" in choice.rejected[0][1]


def test_every_scan_has_an_implementation_before_its_reference() -> None:
    for name, best in (
        ("causal_conv1d", "shifted"),
        ("selective_scan", "wavefront"),
        ("linear_scan", "wavefront"),
        ("ssd_scan", "chunked"),
    ):
        table = implementations(getattr(torch.ops.sp_compile, name).default)
        assert (table[0].name, table[-1].name) == (best, "reference")


def test_forest_names_may_be_fixed_or_computed() -> None:
    fixed = Implementation("fixed", SSD, lambda _: None, True, forest_tensors=("prev", "end"))
    computed = Implementation("computed", SSD, lambda _: None, True, forest_tensors=lambda arguments: (f"prev_{arguments['chunk']}",))
    assert fixed.forest_names({}) == ("prev", "end")
    assert computed.forest_names({"chunk": 3}) == ("prev_3",)


def test_refusal_names_every_implementation() -> None:
    with pytest.raises(NoImplementation, match=r"chunked: dtype .*chunked_replay: dtype"):
        select(SSD, ssd_call(dtype=torch.float8_e4m3fn), names=["chunked", "chunked_replay"])
