"""A backend that keeps the graphs it is given, and tiny random models to give it."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from sp_compile.capture import set_backend

GRAPHS: list[GraphModule] = []
OTHERS: list[GraphModule] = []


@set_backend
def recording(graph: GraphModule, inputs: object) -> GraphModule:
    """Counts as ours; runs the captured graph as it is."""
    GRAPHS.append(graph)
    return graph


def stranger(graph: GraphModule, inputs: object) -> GraphModule:
    """Some other backend."""
    OTHERS.append(graph)
    return graph


def sites(graph: GraphModule, name: str) -> list[Node]:
    """The marker nodes of one kind, in order."""
    return [node for node in graph.graph.nodes if str(node.target).removesuffix(".default") == f"sp_compile.{name}"]


def reasons(graph: GraphModule) -> list[str]:
    return [str(node.args[1]) for node in sites(graph, "refusal_site")]


def captured(function: Any, *args: Any, dynamic: bool = True) -> tuple[GraphModule, Any]:
    """The one graph that a call of `function` is captured as, and the result."""
    GRAPHS.clear()
    result = torch.compile(function, backend=recording, dynamic=dynamic, fullgraph=True)(*args)
    assert len(GRAPHS) == 1, f"expected one graph, got {len(GRAPHS)}"
    return GRAPHS[0], result


def capture(function: Any, *args: Any, dynamic: bool = True) -> GraphModule:
    """The one graph that a call of `function` is captured as."""
    return captured(function, *args, dynamic=dynamic)[0]


_COMMON = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "use_cache": False,
}
_MIXED = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
_OWN: dict[str, dict[str, Any]] = {
    "gemma2": _MIXED,
    "gemma3_text": _MIXED,
    "gpt_oss": {**_MIXED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mistral": {"sliding_window": 5},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "head_dim": 8,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
}


def tiny(kind: str, attention: str, **overrides: Any) -> Any:
    """A random causal language model in training mode: 2 layers, hidden size 64, 97 words."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(kind, **{**_COMMON, **_OWN.get(kind, {}), **overrides})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def batch(rows: int = 3, columns: int = 12) -> dict[str, torch.Tensor]:
    """Token ids, labels, and a mask with left padding in row 0 and right padding in row 1."""
    ids = torch.randint(3, 97, (rows, columns), generator=torch.Generator().manual_seed(columns))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}
