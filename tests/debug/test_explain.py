"""The text of `explain`: complete, and about the right graphs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import sp_compile
from sp_compile.debug import regions
from tests.debug.models import Model, compiled, rows

pytestmark = pytest.mark.filterwarnings("ignore:shared_prefix")


def steady(text: str) -> str:
    """The text without times, and without what passes and kernels say about themselves."""
    text = re.sub(r"\d+\.\d+ s", "_ s", text)
    return re.sub(r"(?m)^( {2}passes {5}refine_sharing).*(?:\n {13}.*)*", r"\1 ...", text)


def test_nothing_compiled() -> None:
    assert sp_compile.explain() == "shared_prefix: nothing was compiled in this process\n"
    assert sp_compile.explain(Model()) == "shared_prefix: nothing was compiled for this model in this process\n"


def test_shared_and_dense_calls(tmp_path: Path) -> None:
    model = compiled(Model(), dump=tmp_path)
    model(rows(4, 6, 10))
    model(rows(3, 0, 9))
    text = steady(sp_compile.explain())
    kernels = "\n             ".join(f"{op}: {name}" for op, name in regions.known()[0][0].variants[0].context.kernels.items())  # type: ignore[union-attr]
    assert text == (
        "shared_prefix: the latest call ran 1 graph: 27 logical tokens computed as 27 physical, sharing 1.00\n"
        "\n"
        "region_00\n"
        "  calls      1 shared, 1 dense\n"
        "  last call  3 rows x 9 columns: 27 logical tokens computed densely\n"
        "             because sharing 1.000 is below min_sharing 1.1\n"
        "  keys       ids (rows share tokens up to the first column in which they differ in one of these)\n"
        "  passes     refine_sharing ...\n"
        f"  kernels    {kernels}\n"
        "  unpacked   nothing before the end of the graph\n"
        "  compiled   shared form: 1 time by eager, _ s\n"
        "               1: for all sizes\n"
        "             dense form: 1 time by eager, _ s\n"
        "               1: for all sizes\n"
        f"  dump       {tmp_path / 'region_00'}\n"
    )


def test_passes_say_what_they_changed() -> None:
    compiled(Model(), disable=["sink_unpacking"])(rows())
    text = sp_compile.explain()
    assert re.search(r"share_prefixes +\d+ changes +\d+\.\d+ s  .*\+shared_attention .*-scaled_dot_product_attention", text)
    assert re.search(r"add_forest_masks +1 change +\d+\.\d+ s  \+sp_compile.attention.default -shared_attention", text)
    assert re.search(r"sink_unpacking +switched off", text)
    assert "dump" not in text


def test_refusal_is_told_once_with_its_remedy() -> None:
    compiled(Model(causal=False))(rows())
    text = sp_compile.explain()
    assert "0 shared, 1 dense" in text
    assert "40 logical tokens computed densely" in text
    assert text.count("Only causal attention can be shared.") == 1
    assert "keys" not in text


def test_guards_are_in_the_users_sizes() -> None:
    compiled(Model(), inner="aot_eager", min_sharing=1.5)(rows(4, 6, 10))
    region, _ = regions.known()[0]
    bucket = region.variants[0].buckets[0]
    bucket.guards.append(bucket.symbols["T"] <= 4096)  # type: ignore[attr-defined]
    assert "1: for sizes with " in sp_compile.explain()
    assert "T <= 4096" in sp_compile.explain()


def test_only_graphs_of_the_model_are_told() -> None:
    first, second = Model(), Model(graph_break=True)
    one, two = compiled(first), compiled(second)
    one(rows())
    two(rows())
    for given in (one, first, first.head):
        assert "1 graph of this model" in sp_compile.explain(given)
        assert "region_00\n" in sp_compile.explain(given)
    assert "region_00\n" not in sp_compile.explain(two)
    assert "calls      1 shared, 0 dense" in sp_compile.explain(second.qkv)


def test_model_of_a_function_is_found() -> None:
    model, other = Model(), Model()

    def step(ids: Tensor) -> Tensor:
        return model(ids).mean()

    run = compiled(step)
    run(rows())
    assert "1 graph of this model" in sp_compile.explain(run)
    assert "1 graph of this model" in sp_compile.explain(step)
    assert "nothing was compiled for this model" in sp_compile.explain(other)


@pytest.mark.parametrize("given", [3, len, lambda ids: ids])
def test_what_is_no_model_is_an_error(given: object) -> None:
    compiled(Model())(rows(1))
    with pytest.raises(sp_compile.InvalidInput, match="Pass the model itself"):
        sp_compile.explain(given)


def test_graphs_that_are_gone_are_forgotten() -> None:
    import gc

    model = compiled(Model())
    model(rows())
    del model
    torch._dynamo.reset()
    gc.collect()
    assert sp_compile.explain() == "shared_prefix: nothing was compiled in this process\n"
