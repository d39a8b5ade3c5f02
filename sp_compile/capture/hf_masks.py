"""transformers: the functions of `masking_utils` that make causal masks, marked with a `mask_site`.

The library's own function runs and its mask stays in the graph. The marker adds from what it was made: the [B, L] padding mask, the
window or chunk of the configuration, and the segments that the library reads off jumps in the position ids. It does so only without a
padding mask and without a cache, and the marker has segments under just these conditions.

No marker: a bidirectional mask, a 4-D mask that the caller made (the library hands it on), no mask at all (None), and the [B, L] mask
that flash attention takes as it is. A `BlockMask` is no tensor and cannot pass through an op; its marker travels as an attribute of it.
"""

from __future__ import annotations

import inspect
import sys
import types
from functools import partial
from typing import Any

import torch

from sp_compile.capture import versions
from sp_compile.capture.hf_attention import BLOCK_MASK_SITE
from sp_compile.capture.polyfills import Function, Parameters, bind, clone, constant, refuse, substitute

_MODULE = "transformers.masking_utils"
# 5.24 renamed past_key_values to cache, and a decorator still accepts the old name.
_ALIASES = {"past_key_values": "cache"}
# layer_idx picks a cache layer, and an empty cache is the same for each. allow_is_causal_skip only asks for a tensor.
_KNOWN = (
    "config",
    "inputs_embeds",
    "attention_mask",
    "cache",
    "past_key_values",
    "position_ids",
    "layer_idx",
    "allow_is_causal_skip",
)


def _segments(original: types.FunctionType, raw: types.FunctionType) -> Function:
    def find_packed_sequence_indices(position_ids: Any) -> Any:
        segments = raw(position_ids)
        if isinstance(segments, torch.Tensor):
            return torch.ops.sp_compile.segments_site(segments, position_ids)
        return segments

    return find_packed_sequence_indices


def _why_not(bound: dict[str, Any], cache: Any) -> str | None:
    """Why a mask made from these arguments has no known form, or None. Written for Dynamo to trace."""
    for name, value in bound.items():
        if name not in _KNOWN and value is not None:
            return f"a causal mask was made with an argument that is not known: {name}"
    mask, embeds = bound["attention_mask"], bound["inputs_embeds"]
    if mask is not None and mask.shape[1] != embeds.shape[1]:
        return "the attention mask and the input differ in length (a cache with past tokens, or a prefix)"
    if cache is not None:
        length = cache.get_seq_length()
        if isinstance(length, torch.Tensor):
            return "the length of the cache is a tensor (a static cache)"
        if length != 0:
            return "the cache holds past tokens"
    return None


def _mask(
    original: types.FunctionType,
    raw: types.FunctionType,
    *,
    find_segments: Function,
    window_attribute: str | None,
    chunk_attribute: str | None,
) -> Function:
    unwrapped = inspect.unwrap(original)
    assert isinstance(unwrapped, types.FunctionType), f"expected a Python function, got {type(unwrapped)}"
    parameters = Parameters(unwrapped, _ALIASES)
    names, defaults, aliases = parameters.names, parameters.defaults, parameters.aliases
    honours_is_causal = chunk_attribute is None

    def create_mask(*args: Any, **kwargs: Any) -> Any:
        result = raw(*args, **kwargs)
        bound = bind(names, defaults, aliases, args, kwargs)
        config, mask, embeds, positions = bound["config"], bound["attention_mask"], bound["inputs_embeds"], bound["position_ids"]
        if honours_is_causal and not getattr(config, "is_causal", True):
            return result
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.dim() != 2):
            return result
        if result is None or (isinstance(result, torch.Tensor) and result.dim() != 4):
            return result
        cache = bound["cache"] if "cache" in bound else bound["past_key_values"]
        reason = _why_not(bound, cache)
        if reason is not None:
            return refuse(result, reason)
        segments = None
        if positions is not None and mask is None and cache is None:
            if embeds.shape[0] != positions.shape[0]:
                positions = positions.expand(embeds.shape[0], -1)
            segments = find_segments(positions)
        dense = result if isinstance(result, torch.Tensor) else embeds.new_ones((1, 1, 1, 1), dtype=torch.bool)
        site = torch.ops.sp_compile.mask_site(
            dense,
            mask,
            segments,
            kind="causal",
            window=None if window_attribute is None else constant(getattr(config, window_attribute)),
            chunk=None if chunk_attribute is None else constant(getattr(config, chunk_attribute)),
        )
        if isinstance(result, torch.Tensor):
            return site
        setattr(result, BLOCK_MASK_SITE, site)
        return result

    return create_mask


def _flex_mask(original: types.FunctionType, raw: types.FunctionType) -> Function:
    # The library asks for a nested torch.compile and branches on the padding's values; either breaks the graph. The block mask below is
    # the same one, since masking with an all-true padding changes nothing.
    parameters = Parameters(original)
    names, defaults = parameters.names, parameters.defaults
    own = original.__globals__
    and_masks, padding_mask, prepare, offset, create = (
        own["and_masks"],
        own["padding_mask_function"],
        own["prepare_padding_mask"],
        own["add_offsets_to_mask_function"],
        own["create_block_mask"],
    )

    def flex_attention_mask(*args: Any, **kwargs: Any) -> Any:
        bound = bind(names, defaults, {}, args, kwargs)
        function, lengths, begin = bound["mask_function"], (bound["q_length"], bound["kv_length"]), bound["kv_offset"]
        if bound["attention_mask"] is not None:
            padding = prepare(bound["attention_mask"], lengths[1], begin)
            function = and_masks(function, padding_mask(padding))
        function = offset(function, bound["q_offset"], begin)
        return create(function, bound["batch_size"], None, lengths[0], lengths[1], device=bound["device"])

    return flex_attention_mask


_FUNCTIONS = {
    "create_causal_mask": (None, None),
    "create_sliding_window_causal_mask": ("sliding_window", None),
    "create_chunked_causal_mask": (None, "attention_chunk_size"),
}


def scan() -> None:
    """Substitutes the mask functions, if transformers' module for them is imported."""
    module = sys.modules.get(_MODULE)
    find = getattr(module, "find_packed_sequence_indices", None)
    if not versions.is_tested("transformers") or not isinstance(find, types.FunctionType):
        return
    substitute(find, _segments)
    substitute(getattr(module, "flex_attention_mask", None), _flex_mask)
    find_segments = _segments(find, clone(find))
    for name, (window, chunk) in _FUNCTIONS.items():
        build = partial(_mask, find_segments=find_segments, window_attribute=window, chunk_attribute=chunk)
        substitute(getattr(module, name, None), build)
