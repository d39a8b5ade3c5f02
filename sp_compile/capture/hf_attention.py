"""transformers: attention functions, marked with an `attention_site`.

Every attention layer of transformers calls one function that it looks up by name: the modelling module's own
`eager_attention_forward`, or `sdpa`, `flex_attention`, `flash_attention_*` from the attention interface (kernels from the hub register
`flash_attention_forward` again under their own name). The marker says what that function itself does with its arguments, and no more:
`eager` and `sdpa` ignore `sliding_window`, since their window is part of the mask; `flash_attention_*` applies it.

An eager function is marked if its source is known plain attention (`eager_form`). Functions that nobody here knows get no polyfill:
the graph shows what they do.
"""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from sp_compile.capture import versions
from sp_compile.capture.eager_form import recognise
from sp_compile.capture.polyfills import Function, Parameters, bind, constant, refuse, substitute

# The attribute of a BlockMask, while tracing, that holds the mask_site made for it (hf_masks).
BLOCK_MASK_SITE = "_sp_compile_mask_site"

# Keyword arguments that no attention function of the tested versions lets change its result.
_INERT = frozenset(
    (
        "cache_position",
        "deterministic",
        "dropout",
        "kernel_options",
        "layer_idx",
        "logits_to_keep",
        "num_items_in_batch",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_ids",
        "return_dict",
        "sliding_window",
        "training",
        "use_cache",
    )
)


def _unknown(bound: dict[str, Any], known: tuple[str, ...], defaults: dict[str, Any]) -> str | None:
    """The first argument that is neither known, inert, nor at its default."""
    for name, value in bound.items():
        if name in known or name in _INERT or value is None or value is False:
            continue
        if name in defaults and defaults[name] is value:
            continue
        return name
    return None


def _mark(
    result: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any,
    *,
    sinks: Any = None,
    bias: Any = None,
    scale: Any = None,
    is_causal: bool = False,
    window: Any = None,
    softcap: Any = None,
    dropout: Any = 0.0,
) -> Any:
    if query.dim() != 4 or key.dim() != 4 or query.shape[2] != key.shape[2]:
        return refuse(result, "queries and keys of an attention differ in length (a cache with past tokens, or cross attention)")
    site = torch.ops.sp_compile.attention_site(
        result[0],
        query,
        key,
        value,
        mask,
        sinks,
        bias,
        scale=constant(scale),
        is_causal=bool(is_causal),
        window=constant(window),
        softcap=constant(softcap),
        dropout=constant(dropout),
    )
    return (site, *result[1:])


def _eager(original: types.FunctionType, raw: types.FunctionType) -> Function | None:
    form = recognise(original)
    if form is None:
        return None
    parameters = Parameters(original)
    names, defaults = parameters.names, parameters.defaults
    scale_from_module, softcap, bias, sinks = form.scale == "module", form.softcap, form.bias, form.sinks

    def eager_attention(*args: Any, **kwargs: Any) -> Any:
        result = raw(*args, **kwargs)
        bound = bind(names, defaults, {}, args, kwargs)
        module = bound["module"]
        scale = bound["scaling"]
        if scale is None and scale_from_module:
            scale = module.head_dim**-0.5
        return _mark(
            result,
            bound[names[1]],
            bound[names[2]],
            bound[names[3]],
            bound["attention_mask"],
            sinks=module.sinks if sinks else None,
            bias=bound["position_bias"] if bias else None,
            scale=scale,
            softcap=bound["softcap"] if softcap else None,
            dropout=bound["dropout"] if module.training else 0.0,
        )

    return eager_attention


def _sdpa(original: types.FunctionType, raw: types.FunctionType) -> Function:
    parameters = Parameters(original)
    names, defaults = parameters.names, parameters.defaults
    known: tuple[str, ...] = (
        "module",
        "query",
        "key",
        "value",
        "attention_mask",
        "dropout",
        "scaling",
        "is_causal",
        "position_bias",
        "s_aux",
    )
    if "softcap" not in names:
        known = (*known, "softcap")  # swallowed by **kwargs: torch's function has no such thing, and the library computes without it

    def sdpa_attention(*args: Any, **kwargs: Any) -> Any:
        result = raw(*args, **kwargs)
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := _unknown(bound, known, defaults)) is not None:
            return refuse(result, f"sdpa_attention_forward was called with an argument that is not known: {name}")
        mask, is_causal = bound["attention_mask"], bound["is_causal"]
        if is_causal is None:
            is_causal = getattr(bound["module"], "is_causal", True)
        return _mark(
            result,
            bound["query"],
            bound["key"],
            bound["value"],
            mask,
            bias=bound["position_bias"],
            scale=bound["scaling"],
            is_causal=mask is None and is_causal,
            dropout=bound["dropout"],
        )

    return sdpa_attention


def _flex(original: types.FunctionType, raw: types.FunctionType) -> Function:
    parameters = Parameters(original)
    names, defaults = parameters.names, parameters.defaults
    known = ("module", "query", "key", "value", "attention_mask", "scaling", "softcap", "s_aux", "position_bias", "is_causal")

    def flex_attention(*args: Any, **kwargs: Any) -> Any:
        result = raw(*args, **kwargs)
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := _unknown(bound, known, defaults)) is not None:
            return refuse(result, f"flex_attention_forward was called with an argument that is not known: {name}")
        mask = bound["attention_mask"]
        if mask is not None and not isinstance(mask, torch.Tensor):
            mask = getattr(mask, BLOCK_MASK_SITE, None)
            if mask is None:
                return refuse(result, "flex attention was given a BlockMask that was not made by a known mask function")
        return _mark(
            result,
            bound["query"],
            bound["key"],
            bound["value"],
            mask,
            sinks=bound["s_aux"],
            bias=bound["position_bias"],
            scale=bound["scaling"],
            softcap=bound["softcap"],
        )

    return flex_attention


@torch._dynamo.assume_constant_result  # type: ignore[untyped-decorator]
def flash_supports(*features: str) -> bool | None:
    """Whether the loaded flash attention honours one of `features` (it drops what it does not know); None if none is loaded."""
    utils = sys.modules.get("transformers.modeling_flash_attention_utils")
    keywords = getattr(getattr(utils, "_process_flash_kwargs_fn", None), "keywords", None)
    if not isinstance(keywords, dict) or "supports_mapping" not in keywords:
        return None
    return any(bool(keywords["supports_mapping"].get(feature, False)) for feature in features)


def _flash(original: types.FunctionType, raw: types.FunctionType) -> Function:
    parameters = Parameters(original)
    names, defaults = parameters.names, parameters.defaults
    known = ("module", "query", "key", "value", "attention_mask", "dropout", "scaling", "softcap", "is_causal", "s_aux")

    def flash_attention(*args: Any, **kwargs: Any) -> Any:
        result = raw(*args, **kwargs)
        bound = bind(names, defaults, {}, args, kwargs)
        if (name := _unknown(bound, known, defaults)) is not None:
            return refuse(result, f"flash_attention_forward was called with an argument that is not known: {name}")
        mask, query, is_causal = bound["attention_mask"], bound["query"], bound["is_causal"]
        if mask is None and bound.get("position_ids") is not None and query.shape[0] == 1:
            return refuse(result, "flash attention reads sequence borders off the position ids of a batch with one row")
        if is_causal is None:
            is_causal = bound["module"].is_causal
        window, sinks = bound["sliding_window"], bound["s_aux"]
        if window is not None and not flash_supports("window_size"):
            return refuse(result, "the loaded flash attention is not known to honour a sliding window")
        if sinks is not None and not flash_supports("s_aux", "learnable_sink"):
            return refuse(result, "the loaded flash attention is not known to honour attention sinks")
        return _mark(
            result,
            query,
            bound["key"],
            bound["value"],
            mask,
            sinks=sinks,
            scale=bound["scaling"],
            is_causal=is_causal,
            window=window,
            softcap=bound["softcap"],
            dropout=bound["dropout"],
        )

    return flash_attention


def _paged(original: types.FunctionType, raw: types.FunctionType) -> Function:
    reason = f"{original.__name__} reads and writes a paged cache"

    def paged_attention(*args: Any, **kwargs: Any) -> Any:
        return refuse(raw(*args, **kwargs), reason)

    return paged_attention


_BY_NAME = {
    ("transformers.integrations.sdpa_attention", "sdpa_attention_forward"): _sdpa,
    ("transformers.integrations.flex_attention", "flex_attention_forward"): _flex,
    ("transformers.integrations.flash_attention", "flash_attention_forward"): _flash,
    ("transformers.integrations.eager_paged", "eager_paged_attention_forward"): _paged,
    ("transformers.integrations.sdpa_paged", "sdpa_attention_paged_forward"): _paged,
    ("transformers.integrations.flash_paged", "paged_attention_forward"): _paged,
}


def scan() -> None:
    """Substitutes the attention functions of every module imported so far."""
    if not versions.is_tested("transformers"):
        return
    for (module, name), build in _BY_NAME.items():
        substitute(getattr(sys.modules.get(module), name, None), build)
    for loaded in tuple(sys.modules.values()):
        names = getattr(loaded, "__dict__", None)
        if not isinstance(names, dict):
            continue
        interface = names.get("ALL_ATTENTION_FUNCTIONS")
        for mapping in ("_global_mapping", "_local_mapping"):
            for function in tuple((getattr(interface, mapping, None) or {}).values()):
                substitute(function, _eager)
        if interface is not None or "eager_attention_forward" in names:
            for name, function in tuple(names.items()):
                if isinstance(name, str) and name.endswith("eager_attention_forward"):
                    substitute(function, _eager)
