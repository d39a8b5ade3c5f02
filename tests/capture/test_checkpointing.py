"""Markers inside of an activation checkpoint's body."""

from __future__ import annotations

import pytest
import torch

from tests.capture.recording import GRAPHS, batch, recording, sites, tiny

pytest.importorskip("transformers")


def test_markers_are_found_in_the_checkpointed_body() -> None:
    model, inputs = tiny("llama", "sdpa", num_hidden_layers=1), batch()
    eager = model(**inputs).loss
    model.gradient_checkpointing_enable({"use_reentrant": False})
    assert torch.equal(torch.compile(model, backend=recording, dynamic=True)(**inputs).loss, eager)
    assert len(GRAPHS) == 1
    bodies = [module for name, module in GRAPHS[0].named_modules() if name and isinstance(module, torch.fx.GraphModule)]
    assert sum(len(sites(body, "attention_site")) for body in bodies) == 1
    assert len(sites(GRAPHS[0], "mask_site")) == 1
