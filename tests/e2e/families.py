"""Tiny Hugging Face decoders of many families. Windows and chunks are shorter than the prompts of the scenarios."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.e2e.models import spread
from tests.e2e.scenarios import VOCABULARY

_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_WINDOW = {"sliding_window": 5}
_LAYERS = {"layer_types": ["sliding_attention", "full_attention"]}
_HEAD = {"head_dim": 8}
_OLD = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4}
_NO_EXPERTS = {"first_k_dense_replace": 2, "n_group": 1, "topk_group": 1}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    # windows, softcaps, and layers that differ
    "mistral": ("Mistral", _WINDOW),
    "gemma2": ("Gemma2", {**_WINDOW, **_HEAD, "query_pre_attn_scalar": 8}),
    "gemma3": ("Gemma3", {**_WINDOW, **_HEAD, **_LAYERS, "query_pre_attn_scalar": 8}),
    "phi3": ("Phi3", {**_WINDOW, "partial_rotary_factor": 0.5}),
    "gpt2": ("GPT2", _OLD),
    "cohere2": ("Cohere2", {**_WINDOW, **_LAYERS}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0]}),
    "starcoder2": ("Starcoder2", {**_WINDOW, "residual_dropout": 0.0, "embedding_dropout": 0.0}),
    # biases of the distance
    "bloom": ("Bloom", {"n_head": 4, "n_layer": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0}),
    "mpt": ("Mpt", {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}),
    "falcon_alibi": ("Falcon", {"alibi": True}),
    # older code, written out
    "opt": ("OPT", {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}),
    "gpt_neo": ("GPTNeo", {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 5,
                           "resid_dropout": 0.0, "embed_dropout": 0.0, "attention_dropout": 0.0}),
    "gpt_neox": ("GPTNeoX", {}),
    "gptj": ("GPTJ", {**_OLD, "rotary_dim": 4}),
    "codegen": ("CodeGen", {**_OLD, "rotary_dim": 4, "n_ctx": 64}),
    "falcon": ("Falcon", {}),
    "falcon_groups": ("Falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "persimmon": ("Persimmon", {}),
    "nemotron": ("Nemotron", {}),
    # and newer
    "qwen2": ("Qwen2", {**_WINDOW, "use_sliding_window": True, "max_window_layers": 1}),
    "stablelm": ("StableLm", {}),
    "granite": ("Granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "deepseek": ("DeepseekV3", {**_LATENT, **_NO_EXPERTS}),
    "llama4": ("Llama4", {**_HEAD, "intermediate_size_mlp": 48, "attention_chunk_size": 6, "moe_layers": [], "no_rope_layers": [1, 0],
                          "layer_types": ["chunked_attention", "full_attention"]}),
    "ernie": ("Ernie4_5", _HEAD),
    "glm4": ("Glm4", _HEAD),
    "exaone4": ("Exaone4", {**_WINDOW, "sliding_window_pattern": 2}),
}  # fmt: skip

NINE = ("mistral", "gemma2", "gemma3", "phi3", "gpt2", "cohere2", "olmo2", "smollm3", "starcoder2")


def make(family: str, **changes: Any) -> nn.Module:
    """A model of a family, its configuration changed."""
    import transformers

    name, own = CONFIGS[family]
    kind: Any = getattr(transformers, f"{name}LMHeadModel", None) or getattr(transformers, f"{name}ForCausalLM")
    return spread(kind(kind.config_class(**{**_TINY, **own, **changes})))
