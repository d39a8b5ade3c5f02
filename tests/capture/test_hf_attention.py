"""Attention functions of transformers and of user modules, called alone."""

from __future__ import annotations

import sys
import types
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from sp_compile.capture import install
from sp_compile.capture.eager_form import EagerForm, recognise
from sp_compile.capture.polyfills import is_substituted
from tests.capture.recording import capture, reasons, sites

pytest.importorskip("transformers")

Q, K, V = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5)
MODULE = nn.Module()
MODULE.num_key_value_groups, MODULE.is_causal, MODULE.head_dim = 2, True, 8


def repeat_kv(hidden_states: torch.Tensor, n_rep: int) -> torch.Tensor:
    batch, num_key_value_heads, slen, head_dim = hidden_states.shape
    if n_rep == 1:
        return hidden_states
    hidden_states = hidden_states[:, :, None, :, :].expand(batch, num_key_value_heads, n_rep, slen, head_dim)
    return hidden_states.reshape(batch, num_key_value_heads * n_rep, slen, head_dim)


def eager_attention_forward(
    module: nn.Module,
    query_states: torch.Tensor,
    key_states: torch.Tensor,
    value_states: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Plain attention under other names, as user code has it."""
    key_states = repeat_kv(key_states, module.num_key_value_groups)
    value_states = repeat_kv(value_states, module.num_key_value_groups)
    attn_weights = torch.matmul(query_states, key_states.transpose(-1, -2)) * scaling
    if attention_mask is not None:
        causal_mask = attention_mask[:, :, :, : key_states.shape[-2]]
        attn_weights = attn_weights + causal_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-1, dtype=torch.float32).to(query_states.dtype)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value_states)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


def almost_eager_attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    key = repeat_kv(key, module.num_key_value_groups)
    value = repeat_kv(value, module.num_key_value_groups)
    attn_weights = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        attn_weights = attn_weights + attention_mask
    attn_weights = nn.functional.softmax(attn_weights, dim=-2)
    attn_weights = nn.functional.dropout(attn_weights, p=dropout, training=module.training)
    attn_output = torch.matmul(attn_weights, value)
    attn_output = attn_output.transpose(1, 2).contiguous()
    return attn_output, attn_weights


PLAIN = EagerForm(scale="given", softcap=False, bias=False, sinks=False)
LIBRARY = {
    "llama": PLAIN,
    "gpt2": EagerForm(scale="query", softcap=False, bias=False, sinks=False),
    "gemma2": EagerForm(scale="module", softcap=True, bias=False, sinks=False),
    "gpt_oss": EagerForm(scale="given", softcap=False, bias=False, sinks=True),
    "vjepa2": None,
}


@pytest.mark.parametrize("model", LIBRARY)
def test_library_forms_are_recognised(model: str) -> None:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    assert recognise(module.eager_attention_forward) == LIBRARY[model]


def test_forms_are_read_from_the_source_and_its_globals() -> None:
    assert recognise(eager_attention_forward) == PLAIN
    assert recognise(almost_eager_attention_forward) is None
    other = {**eager_attention_forward.__globals__, "repeat_kv": lambda hidden_states, n_rep: hidden_states}
    assert recognise(types.FunctionType(eager_attention_forward.__code__, other, "eager_attention_forward")) is None


def test_user_modules_are_scanned_when_imported_later() -> None:
    module = types.ModuleType("a_user_module")
    module.eager_attention_forward = eager_attention_forward
    sys.modules[module.__name__] = module
    try:
        install()
        assert is_substituted(eager_attention_forward)
        assert not is_substituted(almost_eager_attention_forward)
        mask = torch.zeros(2, 1, 6, 6)
        graph = capture(lambda q, k, v, m: eager_attention_forward(MODULE, q, k, v, m, scaling=0.5, sliding_window=3)[0], Q, K, V, mask)
    finally:
        del sys.modules[module.__name__]
    (site,) = sites(graph, "attention_site")
    assert site.args[4].op == "placeholder"
    # An eager function ignores the window it is given: windows are part of its mask.
    assert dict(site.kwargs) == {"scale": 0.5, "is_causal": False, "window": None, "softcap": None, "dropout": 0.0}
    assert site.args[3].meta["example_value"].shape[1] == V.shape[1]


def sdpa(**kwargs: Any) -> Any:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return lambda q, k, v, m: sdpa_attention_forward(MODULE, q, k, v, m, **kwargs)[0]


def test_sdpa_without_a_mask_is_causal_by_itself() -> None:
    (site,) = sites(capture(sdpa(), Q, K, V, None), "attention_site")
    assert (site.args[4], site.kwargs["is_causal"], site.kwargs["scale"]) == (None, True, None)
    (site,) = sites(capture(sdpa(is_causal=False, scaling=0.3), Q, K, V, None), "attention_site")
    assert (site.kwargs["is_causal"], site.kwargs["scale"]) == (False, 0.3)


def test_sdpa_carries_a_position_bias() -> None:
    (site,) = sites(capture(sdpa(position_bias=torch.randn(1, 4, 6, 6)), Q, K, V, torch.zeros(2, 1, 6, 6)), "attention_site")
    assert site.args[6] is not None


def test_an_unknown_argument_is_refused_by_name() -> None:
    graph = capture(sdpa(surprise=torch.ones(1), output_attentions=None, position_ids=torch.arange(6)[None]), Q, K, V, None)
    assert reasons(graph) == ["sdpa_attention_forward was called with an argument that is not known: surprise"]
    assert sites(graph, "attention_site") == []


def test_keys_of_another_length_are_refused() -> None:
    longer = torch.randn(2, 2, 9, 8)
    graph = capture(sdpa(), Q, longer, longer, torch.zeros(2, 1, 6, 9))
    assert "differ in length" in reasons(graph)[0]


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool = False, softmax_scale: Any = None, **rest: Any
) -> Any:
    """Stands in for a flash attention library: [B, L, H, D] in and out."""
    groups = query.shape[2] // key.shape[2]
    heads_first = (x.transpose(1, 2) for x in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)))
    return nn.functional.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=softmax_scale).transpose(1, 2)


@pytest.mark.parametrize(("features", "expected"), [((), "sinks"), (("s_aux",), None)])
def test_flash_carries_what_the_library_honours(monkeypatch: pytest.MonkeyPatch, features: tuple[str, ...], expected: str | None) -> None:
    utils = pytest.importorskip("transformers.modeling_flash_attention_utils")
    from transformers.integrations import flash_attention

    names = (
        "dropout_p window_size deterministic softcap s_aux learnable_sink max_seqlen_q max_seqlen_k block_table page_table cache_seqlens"
    )
    supports = dict.fromkeys(names.split(), False) | dict.fromkeys(("window_size", *features), True)
    process = partial(utils._process_flash_attention_kwargs, supports_mapping=supports)
    monkeypatch.setattr(utils, "_process_flash_kwargs_fn", process)
    # Newer versions return a second function that prepares arguments, for paged caches.
    paged = "block_table" in utils._process_flash_attention_kwargs.__code__.co_varnames
    functions = ((attend, None, None, None, None), (process, None) if paged else process)
    monkeypatch.setattr(utils, "lazy_import_flash_attention", lambda implementation: functions)
    monkeypatch.setattr(flash_attention, "get_target_dtype", lambda query, module: None)
    module = nn.Module()
    module.is_causal, module.config = True, types.SimpleNamespace(_attn_implementation="flash_attention_2")
    sinks = torch.zeros(4)

    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flash_attention.flash_attention_forward(module, q, k, v, None, sliding_window=3, s_aux=sinks, scaling=0.5)[0]

    graph = capture(function, Q, K, torch.randn(2, 2, 6, 8))
    if expected is not None:
        assert expected in reasons(graph)[0]
        return
    (site,) = sites(graph, "attention_site")
    assert dict(site.kwargs) == {"scale": 0.5, "is_causal": True, "window": 3, "softcap": None, "dropout": 0.0}
    assert site.args[5] is not None


def test_flex_refuses_a_block_mask_of_unknown_origin() -> None:
    from torch.nn.attention.flex_attention import create_block_mask
    from transformers.integrations.flex_attention import flex_attention_forward

    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 6, 6, device="cpu")
    with torch.no_grad():
        graph = capture(lambda q, k, v: flex_attention_forward(MODULE.eval(), q, k, v, mask)[0], Q, K, torch.randn(2, 2, 6, 8))
    assert "BlockMask" in reasons(graph)[0]
