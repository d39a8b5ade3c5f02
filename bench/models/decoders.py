"""Hugging Face decoders of about a billion parameters, made from configurations with random weights, and small ones of the same kinds.

| name | in the manner of | what it has |
| --- | --- | --- |
| llama | Llama 3.2 1B | 16 layers, 32 query and 8 key heads of 64, tied embedding of 128,256 |
| qwen3 | Qwen3 0.6B | 28 layers, 16 query and 8 key heads of 128, normed queries and keys, tied embedding of 151,936 |
| qwen3_moe | Qwen3 MoE, 1.06B in all | 16 layers of 32 experts of 512, 4 a token, 16 query and 4 key heads of 128 |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

_PLAIN: dict[str, Any] = {"use_cache": False, "tie_word_embeddings": True, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip
_EXPERTS: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "output_router_logits": True}

CONFIGS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": (
        "Llama",
        {
            "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131072,
        },
        {},
    ),
    "qwen3": (
        "Qwen3",
        {
            "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16,
            "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        },
        {},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 16,
            "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40960, "num_experts": 32, "num_experts_per_tok": 4,
            "moe_intermediate_size": 512, **_EXPERTS,
        },
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}  # fmt: skip


def build(
    name: str, *, layers: int | None = None, small: bool = False, attention: str = "sdpa", experts: str | None = None, device: str = "cpu"
) -> nn.Module:
    """A model in float32, in training mode, the same for the same arguments.

    Args:
        name: one of `CONFIGS`.
        layers: instead of the configuration's.
        small: the sizes of a test.
        attention: transformers' name of an attention function.
        experts: transformers' name of a way to compute experts; None: its own choice.
        device: where it is made.
    """
    import transformers

    kind, sizes, small_sizes = CONFIGS[name]
    given = {**_PLAIN, **sizes, **({**_SMALL, **small_sizes} if small else {})}
    if layers is not None:
        given["num_hidden_layers"] = layers
    # Linear layers then keep the size of what they get, so that attention is neither uniform nor of one token.
    given["initializer_range"] = given["hidden_size"] ** -0.5
    config = getattr(transformers, f"{kind}Config")(**given)
    config._attn_implementation = attention
    if experts is not None:
        config._experts_implementation = experts
    torch.manual_seed(0)
    with torch.device(device):
        model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model.to(device).train()
