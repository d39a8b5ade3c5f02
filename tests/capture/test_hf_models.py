"""Whole models of transformers: one graph, one marker per attention layer with the model's own numbers, and the dense result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx.experimental._config as fx_config

from tests.capture.recording import GRAPHS, OTHERS, batch, reasons, recording, sites, stranger, tiny

pytest.importorskip("transformers")

CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "sdpa", {"windows": [None, None], "scale": 0.25}),
    ("qwen3", "sdpa", {"windows": [None, None], "scale": 0.25}),
    ("gemma2", "eager", {"windows": [5, None], "scale": 0.0625, "softcap": 50.0}),
    ("gemma3_text", "sdpa", {"windows": [5, None], "scale": 0.0625}),
    ("gpt_oss", "eager", {"windows": [5, None], "scale": 0.25, "sinks": True}),
    ("mistral", "sdpa", {"windows": [5, 5], "scale": 0.25}),
    ("deepseek_v3", "sdpa", {"windows": [None, None], "scale": 24**-0.5}),
]


@pytest.mark.parametrize(("kind", "attention", "expected"), CASES, ids=[case[0] for case in CASES])
def test_model_is_captured_as_one_marked_graph(kind: str, attention: str, expected: dict[str, Any]) -> None:
    model, inputs = tiny(kind, attention), batch()
    eager = model(**inputs)
    eager.loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    out = torch.compile(model, backend=recording, dynamic=True)(**inputs)
    out.loss.backward()

    assert len(GRAPHS) == 1
    graph = GRAPHS[0]
    attentions = sites(graph, "attention_site")
    assert len(attentions) == model.config.num_hidden_layers
    assert reasons(graph) == []
    for node, window in zip(attentions, expected["windows"], strict=True):
        mask = node.args[4]
        assert mask in sites(graph, "mask_site")
        assert mask.kwargs == {"kind": "causal", "window": window, "chunk": None}
        assert mask.args[1].meta["example_value"].shape == inputs["attention_mask"].shape
        assert mask.args[2] is None
        assert node.kwargs["scale"] == pytest.approx(expected["scale"])
        assert node.kwargs["softcap"] == expected.get("softcap")
        assert (node.kwargs["is_causal"], node.kwargs["window"], node.kwargs["dropout"]) == (False, None, 0.0)
        assert (node.args[5] is not None) == expected.get("sinks", False)
        query, key = node.args[1].meta["example_value"], node.args[2].meta["example_value"]
        assert (query.shape[1], key.shape[1]) == (model.config.num_attention_heads, model.config.num_key_value_heads)

    assert torch.equal(out.loss, eager.loss)
    assert torch.equal(out.logits, eager.logits)
    assert {name for name, p in model.named_parameters() if p.grad is not None} == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(model.get_parameter(name).grad, gradient, rtol=1e-6, atol=1e-7, msg=name)


def test_one_graph_serves_every_size() -> None:
    compiled = torch.compile(tiny("llama", "sdpa", num_hidden_layers=1), backend=recording, dynamic=True)
    for rows, columns in ((3, 12), (4, 17), (2, 33), (5, 64)):
        compiled(**batch(rows, columns))
    assert len(GRAPHS) == 1


def test_another_backend_sees_no_difference() -> None:
    model, inputs = tiny("llama", "eager", num_hidden_layers=1), batch()
    with fx_config.patch(use_duck_shape=False):  # as it is for a trace of ours: each input has symbols of its own
        torch.compile(model, backend=stranger, dynamic=True)(**inputs)
    torch.compile(model, backend=recording, dynamic=True)(**inputs)
    (theirs,), (marked,) = OTHERS, GRAPHS
    markers = [node for node in marked.graph.nodes if "sp_compile" in str(node.target)]
    assert not [node for node in theirs.graph.nodes if "sp_compile" in str(node.target)]
    # Besides the markers, the marked graph is theirs: the originals are inlined, not changed.
    assert len(marked.graph.nodes) - len(markers) == len(theirs.graph.nodes)


def test_packed_positions_become_segments() -> None:
    model, inputs = tiny("llama", "sdpa", num_hidden_layers=1), batch()
    del inputs["attention_mask"]
    inputs["position_ids"] = torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]] * 3)
    eager = model(**inputs).loss
    assert torch.equal(torch.compile(model, backend=recording, dynamic=True)(**inputs).loss, eager)
    (mask,) = sites(GRAPHS[0], "mask_site")
    segments = mask.args[2]
    assert mask.args[1] is None
    assert segments in sites(GRAPHS[0], "segments_site")
    assert segments.args[1].meta["example_value"].shape[1] == 12
