"""One account per call of the user, whatever graphs it is made of."""

from __future__ import annotations

import dataclasses
import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.debug import account, calls
from tests.debug.models import Model, compiled, rows

pytestmark = pytest.mark.filterwarnings("ignore:shared_prefix")


def tokens() -> tuple[int, int]:
    run = sp_compile.last_run()
    return run.logical_tokens, run.physical_tokens


def test_no_call_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(sp_compile.SharedPrefixError, match="Call the compiled model first"):
        sp_compile.last_run()


def test_shared_call() -> None:
    compiled(Model())(rows(4, 6, 10))
    run = sp_compile.last_run()
    assert (run.logical_tokens, run.physical_tokens, run.sharing) == (40, 22, 40 / 22)
    assert run.shared
    assert (run.refused, run.notes, run.regions) == ((), (), 1)
    assert (run.compiles, run.dense_compiles) == (1, 0)
    assert run.seconds > 0
    assert run.kernels["attention"].startswith("chains")
    assert [one.name for one in run.passes][:3] == ["refine_sharing", "share_prefixes", "add_forest_masks"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        run.shared = False  # type: ignore[misc]


def test_new_sizes_compile_nothing_and_start_a_new_account() -> None:
    model = compiled(Model())
    model(rows(4, 6, 10))
    model(rows(3, 5, 9))
    assert tokens() == (27, 17)
    assert sp_compile.last_run().compiles == 1


def test_little_sharing_runs_densely_with_a_note() -> None:
    compiled(Model(), min_sharing=2.0)(rows(4, 6, 10))
    run = sp_compile.last_run()
    assert (run.logical_tokens, run.physical_tokens, run.sharing, run.shared) == (40, 40, 1.0, False)
    assert run.notes == ("sharing 1.818 is below min_sharing 2.0",)
    assert (run.refused, run.kernels, run.passes) == ((), {}, ())
    assert (run.compiles, run.dense_compiles) == (1, 1)


def test_refused_call_runs_densely_with_the_reason() -> None:
    compiled(Model(causal=False))(rows(4, 6, 10))
    run = sp_compile.last_run()
    assert (run.logical_tokens, run.physical_tokens, run.shared, run.notes) == (40, 40, False, ())
    (reason,) = run.refused
    assert "sees later tokens" in reason
    assert "models.py:" in reason


def test_one_row_counts_its_tokens() -> None:
    compiled(Model())(rows(1, 6, 10))
    assert tokens() == (10, 10)
    assert "static" in sp_compile.last_run().refused[0]


def test_graph_break_is_summed() -> None:
    model = compiled(Model(graph_break=True))
    for batch in (4, 3, 3):
        model(rows(batch, 6, 10))
    run = sp_compile.last_run()
    assert run.regions == 2
    assert (run.logical_tokens, run.physical_tokens) == (30 + 30, 18 + 30)
    assert run.shared
    assert len(run.refused) == 1
    assert run.compiles == 2
    assert run.dense_compiles == 1


def test_dense_form_of_the_first_sizes() -> None:
    """As torch compiles: with numbers first, with symbols at the second sizes."""
    model = compiled(Model())
    found = []
    for batch in ((4, 0, 10), (4, 0, 10), (3, 0, 7), (4, 0, 10), (5, 0, 9), (4, 6, 10), (6, 0, 8)):
        model(rows(*batch))
        found.append((sp_compile.last_run().compiles, sp_compile.last_run().dense_compiles))
    assert found == [(1, 1), (1, 1), (2, 2), (2, 2), (2, 2), (3, 2), (3, 2)]
    assert "1: for sizes with" in sp_compile.explain()


def test_dense_form_where_batches_share() -> None:
    model = compiled(Model())
    for batch in ((4, 6, 10), (4, 0, 10), (3, 0, 7)):
        model(rows(*batch))
    assert (sp_compile.last_run().compiles, sp_compile.last_run().dense_compiles) == (2, 1)


def test_token_ids_in_a_buffer_are_said() -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Model()
            self.register_buffer("ids", rows(4, 6, 10), persistent=False)

        def forward(self) -> Tensor:
            return self.model(self.ids)  # type: ignore[no-any-return]

    with pytest.warns(UserWarning, match="holds as a buffer"):
        compiled(Held())()  # type: ignore[arg-type]
    with pytest.raises(Exception, match="holds as a buffer"):
        compiled(Held(), strict=True)()  # type: ignore[arg-type]


def test_two_models_alternating_are_not_mixed() -> None:
    first, second = compiled(Model(graph_break=True)), Model()
    second.compile(backend=shared_prefix, options={"inner": "eager"})
    for _ in range(3):
        first(rows(4, 6, 10))
        assert sp_compile.last_run().regions == 2
        second(rows(5, 4, 8))
        assert (tokens(), sp_compile.last_run().regions) == ((40, 24), 1)


def test_model_inside_a_module_is_one_call() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = compiled(Model())

        def forward(self, chosen: Tensor, rejected: Tensor) -> Tensor:
            return self.inner(chosen).mean() - self.inner(rejected).mean()

    pair = Pair()
    for _ in range(2):
        pair(rows(4, 6, 10), rows(3, 5, 9))
        assert tokens() == (67, 39)
        assert sp_compile.last_run().compiles == 1


def test_call_that_fails_does_not_leak_into_the_next() -> None:
    @torch.compiler.disable
    def fail() -> None:
        raise ZeroDivisionError

    class Failing(Model):
        def forward(self, ids: Tensor) -> Tensor:
            x = super().forward(ids)
            fail()
            return x

    model, other = compiled(Failing()), compiled(Model())
    with pytest.raises(ZeroDivisionError):
        model(rows(4, 6, 10))
    assert tokens() == (40, 22)
    other(rows(3, 5, 9))
    assert tokens() == (27, 17)


def test_each_thread_has_its_own_account() -> None:
    model = compiled(Model())
    model(rows(4, 6, 10))
    seen: list[tuple[int, int]] = []

    def work() -> None:
        seen.append(tokens())
        model(rows(3, 5, 9))
        seen.append(tokens())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(40, 22), (27, 17)]
    assert tokens() == (40, 22)


def test_recomputation_in_backward_belongs_to_its_forward() -> None:
    model = compiled(Model())
    ids = rows(4, 6, 10)
    scale = torch.ones((), requires_grad=True)
    out = checkpoint(lambda factor: model(ids) * factor, scale, use_reentrant=False)
    before = account.last_run()
    out.sum().backward()
    assert account.last_run() == before
    assert not calls.in_backward()


def test_accounts_keep_nothing_alive() -> None:
    model = compiled(Model())
    ids = rows(4, 6, 10)
    out = model(ids)
    left = [weakref.ref(value) for value in (ids, out, model._orig_mod.head.weight)]
    del model, ids, out
    torch._dynamo.reset()
    gc.collect()
    assert [reference() for reference in left] == [None] * 3
    assert tokens() == (40, 22)


def test_without_a_frame_a_call_ends_when_its_first_region_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "space", lambda: None)
    model = compiled(Model(graph_break=True))
    for _ in range(3):
        model(rows(4, 6, 10))
        assert sp_compile.last_run().regions == 2
