"""Tiny Hugging Face decoders with recurrences and convolutions, most of them beside attention; chunks are shorter than most prompts."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.e2e.models import spread
from tests.e2e.scenarios import VOCABULARY

_TINY: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
_SSD = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_expand": 2, "mamba_chunk_size": 8}
_NEMOTRON = {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8, "expand": 2, "head_dim": 8}
_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
          "linear_conv_kernel_dim": 4, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 6, "num_key_value_heads": 4}
_THREE = {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "mamba"], "attention_head_dim": 16}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 0]}

CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba": ("Mamba", {"state_size": 8, "time_step_rank": 4}),
    "falcon_mamba": ("FalconMamba", {"state_size": 8, "time_step_rank": 4}),
    "jamba": ("Jamba", {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
                        "expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False}),
    "zamba": ("Zamba", {"mamba_d_state": 8, "mamba_dt_rank": 4, "n_mamba_heads": 2, "num_hidden_layers": 4, "attention_head_dim": 16,
                        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"]}),
    "mamba2": ("Mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "expand": 2, "chunk_size": 8}),
    "bamba": ("Bamba", {**_SSD, "attn_layer_indices": [1]}),
    "granite": ("GraniteMoeHybrid", {**_SSD, "layer_types": ["mamba", "attention"], "position_embedding_type": "rope",
                                     "num_local_experts": 4, "num_experts_per_tok": 2, "shared_intermediate_size": 16}),
    "zamba2": ("Zamba2", {**_THREE, "mamba_d_state": 8, "mamba_ngroups": 2, "n_mamba_heads": 8, "mamba_headdim": 8, "chunk_size": 8,
                          "num_mem_blocks": 1, "use_shared_attention_adapter": False, "adapter_rank": 4}),
    "falcon_h1": ("FalconH1", {**_SSD, "mamba_d_ssm": 64, "head_dim": 8}),
    "nemotron_h": ("NemotronH", {**_NEMOTRON, "num_hidden_layers": 4, "layers_block_type": ["mamba", "attention", "mlp", "mamba"]}),
    "nemotron_h_experts": ("NemotronH", {**_NEMOTRON, "num_hidden_layers": 3, "layers_block_type": ["mamba", "attention", "moe"],
                                         "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                         "moe_shared_expert_intermediate_size": 16, "n_group": 1, "topk_group": 1}),
    "qwen3_next": ("Qwen3Next", {**_DELTA, **_EXPERTS, "shared_expert_intermediate_size": 16, "partial_rotary_factor": 0.5}),
    "qwen3_5": ("Qwen3_5", {**_DELTA, "rope_parameters": _ROPE}),
    "olmo_hybrid": ("OlmoHybrid", _DELTA),
    "kimi": ("KimiLinear", {**_LATENT, "linear_num_heads": 4, "linear_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
                            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
                            "n_group": 1, "topk_group": 1}),
    "minimax": ("MiniMax", {"layer_types": ["linear_attention", "full_attention"], "block_size": 8, "num_local_experts": 4,
                            "num_experts_per_tok": 2, "head_dim": 8}),
    "recurrent_gemma": ("RecurrentGemma", {"lru_width": 32, "attention_window_size": 6, "block_types": ["recurrent", "attention"],
                                           "head_dim": 8}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8, "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2Moe", {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
}  # fmt: skip


FINAL = frozenset({"recurrent_gemma"})
"""Families whose layers keep the state after the last column, so that no padding can be dropped."""


def make(family: str, **changes: Any) -> nn.Module:
    """A model of a family, its configuration changed."""
    import transformers

    name, own = CONFIGS[family]
    kind: Any = getattr(transformers, f"{name}ForCausalLM")
    return spread(kind(kind.config_class(**{**_TINY, **own, **changes})))
