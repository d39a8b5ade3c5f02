"""Recorded outputs (router logits) do not cost the graph, even in the first call."""

from __future__ import annotations

import pytest
import torch

from tests.capture.recording import GRAPHS, batch, recording, sites, tiny

pytest.importorskip("transformers")


def test_router_logits_are_recorded_within_one_graph() -> None:
    model = tiny("mixtral", "sdpa", num_hidden_layers=1)
    inputs = batch()
    out = torch.compile(model, backend=recording, dynamic=True)(**inputs, output_router_logits=True)
    assert len(GRAPHS) == 1
    assert len(sites(GRAPHS[0], "attention_site")) == 1
    eager = model(**inputs, output_router_logits=True)
    assert len(out.router_logits) == len(eager.router_logits) == 1
    assert torch.equal(out.router_logits[0], eager.router_logits[0])
    assert torch.equal(out.aux_loss, eager.aux_loss)
    assert torch.equal(out.loss, eager.loss)
    # One hook per recorded module and kind of output: the eager forward found them installed.
    assert max(len(module._forward_hooks) for module in model.modules()) == 1
