"""transformers' recurrences become one op each under this backend, and only functions that compute what the op computes."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch._subclasses.fake_tensor import FakeTensorMode

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.capture import hf_methods, hf_scans, install, scan_check
from sp_compile.capture.polyfills import is_substituted, rescan, substitute
from sp_compile.ops import dense_scans
from tests.capture.recording import GRAPHS, OTHERS, capture, captured, reasons, recording, sites, stranger

pytest.importorskip("transformers")

from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.mamba import modeling_mamba as mamba
from transformers.models.mamba2 import modeling_mamba2 as mamba2
from transformers.models.minimax import modeling_minimax as minimax
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

FUNCTIONS: dict[str, tuple[Any, str]] = {
    "conv": (mamba2.causal_conv1d_fn, "dense_causal_conv1d"),
    "ssd": (mamba2.mamba2_chunk_scan, "dense_ssd_scan"),
    "selective": (mamba.mamba_selective_scan, "dense_selective_scan"),
    "delta": (qwen.torch_chunk_gated_delta_rule, "dense_gated_delta_rule"),
    "kda": (kimi.chunk_kimi_delta_attention, "dense_kda"),
}


def _arguments(name: str, length: int = 7) -> tuple[tuple[Any, ...], dict[str, Any]]:
    torch.manual_seed(0)
    if name == "conv":
        return (torch.randn(2, 6, length), torch.randn(6, 4), torch.randn(6)), {"activation": "silu"}
    if name == "ssd":
        B, C = torch.randn(2, 2, length, 2, 5)
        return (torch.randn(2, length, 4, 3), torch.randn(2, length, 4), -torch.rand(4), B, C, 4), {
            "D": torch.randn(4), "z": None, "dt_bias": torch.randn(4), "dt_softplus": True, "dt_limit": (0.1, 2.0),
        }  # fmt: skip
    if name == "selective":
        B, C = torch.randn(2, 2, 5, length)
        x, gate = torch.randn(2, 2, 6, length)
        return (x, torch.rand(2, 6, length), -torch.rand(6, 5), B, C, torch.randn(6), gate), {"delta_softplus": True}
    q, k = torch.randn(2, 2, length, 4, 5) / 2
    g = -torch.rand((2, length, 4, 5) if name == "kda" else (2, length, 4))
    return (q, k, torch.randn(2, length, 4, 3)), {
        "g": g,
        "beta": torch.rand(2, length, 4),
        "chunk_size": 4,
        "use_qk_l2norm_in_kernel": True,
    }


@pytest.fixture(autouse=True)
def scanned() -> None:
    torch._dynamo.reset()
    rescan()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_is_one_op_and_gives_its_own_values(name: str) -> None:
    function, op = FUNCTIONS[name]
    args, kwargs = _arguments(name)
    want = function(*args, **kwargs)
    graph, got = captured(lambda *a: function(*a, **kwargs), *args)
    assert len(sites(graph, op)) == 1
    assert not reasons(graph)
    pairs = zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True)
    assert all(one is other is None or torch.allclose(one, other, rtol=1e-5, atol=1e-6) for one, other in pairs)


@pytest.mark.parametrize("name", ["ssd", "selective", "delta", "kda"])
def test_the_final_state_is_another_op(name: str) -> None:
    function, op = FUNCTIONS[name]
    args, kwargs = _arguments(name)
    kwargs |= {"ssd": {"return_final_states": True}, "selective": {"return_last_state": True}}.get(name, {"output_final_state": True})
    want = function(*args, **kwargs)
    graph, got = captured(lambda *a: function(*a, **kwargs), *args)
    assert len(sites(graph, f"{op}_state")) == 1
    torch.testing.assert_close(got[1], want[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["ssd", "delta", "kda"])
def test_a_state_to_start_from_is_refused(name: str) -> None:
    function, op = FUNCTIONS[name]
    args, kwargs = _arguments(name)
    state = torch.randn(2, 4, 3, 5) if name == "ssd" else torch.randn(2, 4, 5, 3)
    kwargs |= {"initial_states" if name == "ssd" else "initial_state": state}
    graph = capture(lambda *a: function(*a, **kwargs), *args, dynamic=False)  # the library's loops are slow to trace over symbols
    assert not sites(graph, op)
    assert "initial_state" in reasons(graph)[0]


def test_other_activations_stand_beside_the_op() -> None:
    args, _ = _arguments("conv")
    graph, got = captured(lambda *a: mamba2.causal_conv1d_fn(*a, activation="gelu"), *args)
    assert len(sites(graph, "dense_causal_conv1d")) == 1
    torch.testing.assert_close(got, mamba2.causal_conv1d_fn(*args, activation="gelu"))


def test_an_unknown_activation_is_refused() -> None:
    args, _ = _arguments("conv")
    graph = capture(lambda *a: mamba2.causal_conv1d_fn(*a, activation="relu2"), *args)
    assert "relu2" in reasons(graph)[0]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lengths_share_one_graph(name: str) -> None:
    function, _ = FUNCTIONS[name]
    GRAPHS.clear()
    call = torch.compile(lambda a, k: function(*a, **k), backend=recording, dynamic=True)
    for length in (7, 12, 33):
        args, kwargs = _arguments(name, length)
        call(args, kwargs)
    assert len(GRAPHS) == 1


def test_another_backend_sees_the_original() -> None:
    args, kwargs = _arguments("ssd")
    OTHERS.clear()
    torch.compile(lambda *a: mamba2.mamba2_chunk_scan(*a, **kwargs), backend=stranger)(*args)
    assert OTHERS
    assert not any(sites(graph, "dense_ssd_scan") for graph in OTHERS)


def _clone(function: Any, old: str, new: str, name: str) -> Any:
    """The library's PyTorch body with one line changed, under a name of its own."""
    import inspect

    body = inspect.unwrap(function)
    source = inspect.getsource(body)
    source = source[source.index("def ") :]
    assert old in source
    scope: dict[str, Any] = dict(body.__globals__)
    exec(compile(source.replace(old, new, 1), name, "exec"), scope)
    return scope[body.__name__]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("conv", "out = ACT2FN[activation](out)", "out = out * 2"),
        ("ssd", "dt = F.softplus(dt)", "dt = F.softplus(dt) + 0.01"),
        ("selective", "scan_output = scan_output + hidden_states", "scan_output = scan_output - hidden_states"),
        ("delta", "scaling = query.shape[-1] ** -0.5", "scaling = 1.0"),
        ("kda", "scale = 1 / (query.shape[-1] ** 0.5)", "scale = 1.0"),
    ],
)
def test_a_function_that_computes_something_else_is_left_alone(name: str, old: str, new: str) -> None:
    function, _ = FUNCTIONS[name]
    build = hf_scans._BUILDERS[function.__name__]
    same, other = _clone(function, old, old, "same.py"), _clone(function, old, new, "other.py")
    assert build(same, same) is not None
    assert build(other, other) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_the_caller_has_switched_on_does_not_matter(dtype: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.autocast("cpu", torch.bfloat16), torch.inference_mode(), FakeTensorMode():
            for name, (function, _) in FUNCTIONS.items():
                body = _clone(function, "def ", "def ", f"{name}.py")
                assert hf_scans._BUILDERS[function.__name__](body, body) is not None, name
    finally:
        torch.set_default_dtype(before)


def test_a_function_that_cannot_be_run_does_not_agree() -> None:
    def broken(given: dict[str, Any], final: bool) -> Tensor:
        raise RuntimeError("no driver")

    assert not scan_check.agrees("kda", broken)


def test_methods_with_loops_are_one_op() -> None:
    layer = minimax.MiniMaxLightningAttention(
        minimax.MiniMaxConfig(hidden_size=8, num_attention_heads=2, head_dim=4, num_hidden_layers=2, block_size=4), 0
    )
    hidden, mask = torch.randn(2, 9, 8), torch.ones(2, 9, dtype=torch.long)
    want = layer(hidden, None, mask)[0]
    graph, got = captured(lambda x, m: layer(x, None, m)[0], hidden, mask)
    assert len(sites(graph, "dense_linear_attention")) == 1
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class _DoubledLightningAttention(minimax.MiniMaxLightningAttention):  # type: ignore[misc]
    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        out, state = super().forward(hidden_states, *args, **kwargs)
        return 2 * out, state


def test_a_method_that_computes_something_else_is_marked() -> None:
    hf_methods._wrap(_DoubledLightningAttention, "forward", hf_methods._lightning, hf_methods._same_lightning)
    layer = _DoubledLightningAttention(
        minimax.MiniMaxConfig(hidden_size=8, num_attention_heads=2, head_dim=4, num_hidden_layers=2, block_size=4), 0
    )
    hidden, mask = torch.randn(2, 9, 8), torch.ones(2, 9, dtype=torch.long)
    graph, got = captured(lambda x, m: layer(x, None, m)[0], hidden, mask)
    (site,) = sites(graph, "rows_site")
    assert "_DoubledLightningAttention.forward" in site.args[1]
    torch.testing.assert_close(got, layer(hidden, None, mask)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("strict", [False, True])
def test_a_function_that_runs_on_rows_is_named(strict: bool) -> None:
    """Nothing of it is shared, which is said once; a strict run refuses."""
    other = _clone(mamba2.causal_conv1d_fn, "out = ACT2FN[activation](out)", "out = out * 2", "rows.py")
    assert substitute(other, hf_scans._BUILDERS["causal_conv1d_fn"], scan_check.DECLINED)
    words, kernel = torch.nn.Embedding(9, 6), torch.randn(6, 4)
    mixed = torch.nn.Linear(6, 6)

    def model(ids: Tensor) -> Tensor:
        x = mixed(words(ids))
        return mixed(other(x.transpose(1, 2).flip(2), kernel, activation="silu").flip(2).transpose(1, 2))

    ids = torch.randint(9, (4, 8))
    ids[:, :6] = ids[0, :6]
    call = torch.compile(model, backend=shared_prefix, options={"inner": "eager", "strict": strict, "min_sharing": 1.0})
    if strict:
        with pytest.raises(BackendCompilerFailed, match=r"CannotShare: .*causal_conv1d_fn does not give what sharing knows"):
            call(ids)
        return
    with pytest.warns(UserWarning, match="causal_conv1d_fn does not give what sharing knows") as caught:
        got = call(ids)
    assert len([w for w in caught if "sharing knows" in str(w.message)]) == 1
    torch.testing.assert_close(got, model(ids))
    assert sp_compile.last_run().shared


def test_a_method_found_late_asks_for_a_retrace(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a reset nothing is called before a trace: a backend has to learn that its graph was captured too early."""
    late = types.ModuleType("transformers.models.late.modeling_late")
    kind = type("LateRglru", (), {"__module__": late.__name__, "_rnn_scan": lambda self, x, gate, reset, states: (x, None)})
    late.LateRglru = kind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, late.__name__, late)
    torch._dynamo.reset()
    assert install() is True
    assert install() is False


def test_fused_functions_answer_none() -> None:
    assert is_substituted(mamba2.mamba2_split_conv1d_scan_combined)
    assert is_substituted(mamba.mamba_inner_fn)


LIBRARIES = {
    "causal_conv1d": "transformers.models.mamba2.modeling_mamba2.causal_conv1d_fn",
    "ssd_scan": "transformers.models.mamba2.modeling_mamba2.mamba2_chunk_scan",
    "selective_scan": "transformers.models.mamba.modeling_mamba.mamba_selective_scan",
    "gated_delta_rule": "transformers.models.qwen3_next.modeling_qwen3_next.torch_chunk_gated_delta_rule",
    "kda": "transformers.models.kimi_linear.modeling_kimi_linear.chunk_kimi_delta_attention",
    "linear_attention": "lightning",
    "linear_scan": "rg_lru",
}


@pytest.mark.parametrize("kind", LIBRARIES)
def test_replay(kind: str) -> None:
    """Outputs, final states and gradients of the dense ops carry the same bits in every run."""
    given = scan_check.tensors(kind)
    options = dict(scan_check.OPTIONS[kind][0]) | {"dtype": torch.float32, "library": LIBRARIES[kind]}
    known = dense_scans.KINDS[kind]

    def once() -> list[Tensor]:
        leaves = [given[name].clone().requires_grad_() if name in given else None for name in known.tensors]
        found = []
        for op in (known.dense, *((known.dense_state,) if known.state is not None else ())):
            out = op(*leaves, **options)
            found += [out, *torch.autograd.grad(out.square().sum(), [x for x in leaves if x is not None], allow_unused=True)]
        return [x for x in found if x is not None]

    torch.use_deterministic_algorithms(True)
    try:
        first = once()
        assert all(bool(x.abs().sum() > 0) for x in first[:1])
        for _ in range(3):
            assert all(torch.equal(one, other) for one, other in zip(once(), first, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
