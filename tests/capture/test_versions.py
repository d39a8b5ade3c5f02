"""The version gate speaks when a model of the library is compiled, not before."""

from __future__ import annotations

import sys

import pytest
import torch

from sp_compile.capture import require_tested, versions
from sp_compile.errors import UnsupportedVersion

pytest.importorskip("transformers")


def traced_through(name: str) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    node = graph.output(graph.placeholder("x"))
    node.meta["nn_module_stack"] = {"L__self__": ("L['self']", f"{name}.models.llama.modeling_llama.LlamaModel")}
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.parametrize(
    ("version", "tested"), [("5.16.1", False), ("5.17.0", True), ("5.24.3", True), ("5.25.0", False), ("5.20.0.dev0", True), ("odd", False)]
)
def test_range_is_half_open(monkeypatch: pytest.MonkeyPatch, version: str, tested: bool) -> None:
    monkeypatch.setattr(sys.modules["transformers"], "__version__", version)
    assert versions.is_tested("transformers") is tested
    require_tested(traced_through("elsewhere"))
    if tested:
        require_tested(traced_through("transformers"))
    else:
        with pytest.raises(UnsupportedVersion, match=rf"expected transformers >= 5.17 and < 5.25.*got {version}"):
            require_tested(traced_through("transformers"))
