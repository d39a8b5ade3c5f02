"""What must not move: rows beside an edited one, whatever mixes experts, and the time of batches that share next to nothing."""

from __future__ import annotations

import pytest
import torch

import sp_compile
from sp_compile.backend import shared_prefix
from tests.e2e import compare, models
from tests.e2e.scenarios import VOCABULARY, right_padded, star


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm"])
def test_an_edited_completion_moves_no_other_row_of_experts(experts: str) -> None:
    """Experts get other tokens then, in another order; the rows beside it may only be rounded differently."""
    pytest.importorskip("transformers")
    from tests.e2e.test_experts import family

    torch._dynamo.reset()
    model = family("Mixtral", experts)
    call = compare.compiled(model, "eager")
    ids, mask, _ = right_padded(star(rows=4, prompt=6, completion=5))
    edited = ids.clone()
    edited[2, 8] = edited[2, 8] % 90 + 1
    with torch.no_grad():
        before, after = (call(input_ids=x, attention_mask=mask).logits for x in (ids, edited))
        assert sp_compile.last_run().shared
        other = call(input_ids=torch.cat([ids[:, :2] % 90 + 1, ids[:, 2:]], 1), attention_mask=mask).logits
    beside = [0, 1, 3]
    assert compare.relative(after[beside], before[beside]) <= compare.LOGITS
    assert compare.relative(after[2, :8], before[2, :8]) <= compare.LOGITS
    assert compare.relative(after[2, 8:], before[2, 8:]) > 1e-3
    assert all(compare.relative(other[row, 6:], before[row, 6:]) > 1e-3 for row in range(4)), "an edited prompt moves every row"


def test_a_short_prefix_runs_the_dense_graph() -> None:
    """At I = 1.05 packing would cost more than it saves: unless asked for, the inner compiler's own graph runs, bit for bit."""
    ids = torch.randint(1, VOCABULARY, (4, 30), generator=torch.Generator().manual_seed(0))
    ids[:, :2] = ids[0, :2]
    model = models.gpt()
    torch._dynamo.reset()
    wanted = torch.compile(model, backend="aot_eager")(ids)[0]
    torch._dynamo.reset()
    found = torch.compile(model, backend=shared_prefix, options={"inner": "aot_eager"})(ids)[0]
    run = sp_compile.last_run()
    assert not run.shared
    assert "below min_sharing" in run.notes[0]
    assert torch.equal(found, wanted)
    torch._dynamo.reset()
    torch.compile(model, backend=shared_prefix, options={"inner": "eager", "min_sharing": 1.0})(ids)
    assert sp_compile.last_run().sharing == pytest.approx(120 / 114)
