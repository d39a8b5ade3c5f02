"""Losses of decoders on rows, and of the same rows packed by hand: each distinct prefix position once, [1, T].

The packed baselines are what a user would write without a compiler for it. Their descriptions of a batch are made on the host before
the step:

* `flex_tree`: FlexAttention with a mask over the packed tokens, `k <= q < end[k]`, as a `BlockMask`.
* `gathered`: every segment is one sequence of a variable-length flash call, over the gathered keys and values of its ancestors and its own.
* `prefix_grouper`: the package of that name, for stars whose rows have one length, with the same flash kernels underneath.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sp_compile.layout.forest import Forest

IGNORED = -100


def policy_loss(logprobs: Tensor, advantages: Tensor, counted: Tensor) -> Tensor:
    """The clipped surrogate of GRPO at its first step, where the old policy is the present one, mean over counted tokens.

    logprobs, counted [B, L - 1], advantages [B].
    """
    ratio, weight = (logprobs - logprobs.detach()).exp(), advantages[:, None]
    return -(torch.minimum(ratio * weight, ratio.clamp(0.8, 1.2) * weight) * counted).sum() / counted.sum()


class Rows(nn.Module):
    """Loss of rows [B, L], and for mixtures of experts what each token chose and how often each expert was chosen."""

    def __init__(self, model: nn.Module, loss: str) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, input_ids: Tensor, labels: Tensor, advantages: Tensor) -> dict[str, Tensor]:
        out = self.model(input_ids=input_ids)
        if self.loss == "labels":
            loss = self.model.loss_function(out.logits, labels, self.model.config.vocab_size)
        else:
            counted = labels[:, 1:] != IGNORED
            targets = labels[:, 1:].masked_fill(~counted, 0)
            logprobs = out.logits[:, :-1].float().log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            loss = policy_loss(logprobs, advantages, counted)
        return {"loss": loss, **chosen_experts(self.model.config, out)}


def chosen_experts(config: Any, out: Any) -> dict[str, Tensor]:
    """`chosen` int64 [layers, tokens, k] and `counts` int64 [layers, experts] of a mixture of experts; nothing of another model."""
    logits = getattr(out, "router_logits", None)
    if logits is None:
        return {}
    chosen = [one.topk(config.num_experts_per_tok, -1).indices for one in logits]
    counts = [F.one_hot(one, config.num_experts).sum((0, 1)) for one in chosen]
    return {"chosen": torch.stack(chosen), "counts": torch.stack(counts)}


class Packed(nn.Module):
    """The same loss from packed tokens. Keywords beside `packed_inputs` go to the model's attention function."""

    def __init__(self, model: nn.Module, loss: str) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, index: Tensor, labels: Tensor, advantages: Tensor, **tree: Any
    ) -> dict[str, Tensor]:
        logits = self.model(input_ids=input_ids, position_ids=position_ids, **tree).logits[0].float()
        counted = labels[:, 1:] != IGNORED
        targets, tokens = labels[:, 1:].masked_fill(~counted, 0), index[:, :-1]
        logprobs = logits[tokens, targets] - logits.logsumexp(-1)[tokens]
        if self.loss == "labels":
            loss = -(logprobs * counted).sum() / counted.sum()
        else:
            loss = policy_loss(logprobs, advantages, counted)
        return {"loss": loss}


def packed_inputs(batch: dict[str, Tensor]) -> tuple[Forest, dict[str, Tensor]]:
    """The forest of a batch and what `Packed` needs of it, on the batch's device."""
    ids = batch["input_ids"]
    forest = Forest.from_tokens(ids.cpu())
    row, column, index = forest.tensors(("row", "column", "index"), ids.device)
    rest = {name: batch[name] for name in ("labels", "advantages")}
    return forest, {"input_ids": ids[row, column][None], "position_ids": column[None], "index": index, **rest}


# -- FlexAttention with a mask of the tree


def flex_tree(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, tree_mask: Any, scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    if query.device.type == "cpu":  # where there is no backward of it
        place = torch.arange(query.shape[2])
        mask = tree_mask.mask_mod(place, place, place[:, None], place)
        options = {"attn_mask": mask, "scale": scaling, "enable_gqa": query.shape[1] != key.shape[1]}
        return F.scaled_dot_product_attention(query, key, value, **options).transpose(1, 2), None
    out = flex_attention(query, key, value, block_mask=tree_mask, scale=scaling, enable_gqa=query.shape[1] != key.shape[1])
    assert isinstance(out, Tensor), "no log-sum-exps were asked for"
    return out.transpose(1, 2), None


def flex_description(forest: Forest, device: torch.device) -> dict[str, Any]:
    (end,) = forest.tensors(("end",), device)

    def visible(_b: Tensor, _h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (k <= q) & (q < end[k])

    tokens = forest.num_tokens
    return {"tree_mask": create_block_mask(visible, None, None, tokens, tokens, device=str(device))}


# -- segments over gathered ancestors


def flash(q: Tensor, k: Tensor, v: Tensor, starts_q: Tensor, starts_k: Tensor, most: tuple[int, int], scale: float | None) -> Tensor:
    """Causal attention of sequences, aligned at their ends: q [n, H, D], k and v [m, Hkv, D]; starts int32 [sequences + 1]."""
    if q.device.type == "cuda":
        out: Tensor = torch.ops.aten._flash_attention_forward(q, k, v, starts_q, starts_k, *most, 0.0, True, False, scale=scale)[0]
        return out
    place_q, place_k = (torch.arange(len(x), device=x.device) for x in (q, k))
    sequence_q, sequence_k = (torch.searchsorted(s, p, right=True, out_int32=True) for s, p in ((starts_q, place_q), (starts_k, place_k)))
    last_q, last_k = starts_q[sequence_q] - place_q, starts_k[sequence_k] - place_k
    mask = (sequence_q[:, None] == sequence_k) & (last_q[:, None] <= last_k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    dense = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return dense[0].transpose(0, 1)


def gathered(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, tree_keys: Tensor, tree_q: Tensor,
    tree_k: Tensor, tree_most: tuple[int, int], scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    q = query[0].transpose(0, 1)
    k, v = (x[0].transpose(0, 1).index_select(0, tree_keys) for x in (key, value))
    return flash(q, k, v, tree_q, tree_k, tree_most, scaling)[None], None


def gathered_description(forest: Forest, device: torch.device) -> dict[str, Any]:
    start, length, parent = forest.node_start, forest.node_len, forest.parent
    paths: list[np.ndarray[Any, Any]] = []
    for node in range(forest.num_nodes):
        own = np.arange(start[node], start[node] + length[node])
        paths.append(own if parent[node] < 0 else np.concatenate([paths[parent[node]], own]))
    widths = np.array([len(path) for path in paths])
    starts = [torch.from_numpy(np.concatenate([[0], np.cumsum(x)]).astype(np.int32)).to(device) for x in (length, widths)]
    keys = torch.from_numpy(np.concatenate(paths)).to(device)
    return {"tree_keys": keys, "tree_q": starts[0], "tree_k": starts[1], "tree_most": (int(length.max()), int(widths.max()))}


# -- the package prefix-grouper


def grouped(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, tree_grouper: Any,
    scaling: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        (rows, _, width, _), columns = q.shape, k.shape[2]
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]
        starts = [torch.arange(0, rows * n + 1, n, dtype=torch.int32, device=q.device) for n in (width, columns)]
        return flash(*flat, starts[0], starts[1], (width, columns), scaling).unflatten(0, (rows, width))

    return tree_grouper.forward(attend, query, key, value), None


def grouped_description(forest: Forest, device: torch.device) -> dict[str, Any]:
    """Of one star whose completions have one length.

    Raises:
        ValueError: another forest.
        ImportError: the package is absent.
    """
    from prefix_grouper import PrefixGrouper

    lengths = forest.node_len.tolist()
    if forest.num_nodes < 2 or len(set(lengths[1:])) != 1 or forest.parent[1:].any():
        raise ValueError("prefix-grouper: expected one star with completions of one length")
    return {"tree_grouper": PrefixGrouper([lengths], device=device)}


BASELINES = {
    "flex_tree": (flex_tree, flex_description),
    "gathered": (gathered, gathered_description),
    "prefix_grouper": (grouped, grouped_description),
}


def causal(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Of full rows. Under `torch.compile` transformers' own "sdpa" makes a mask, with which kernels compute every pair."""
    grouped = query.shape[1] != key.shape[1]
    if grouped and query.dtype == torch.float32:  # the kernel that saves no scores has no grouped heads
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        grouped = False
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def register(name: str) -> str:
    """Makes a baseline's attention, or "causal", known to transformers; its name there. Models then make no mask of their own."""
    from transformers import AttentionInterface

    AttentionInterface.register(f"bench_{name}", BASELINES[name][0] if name in BASELINES else causal)
    return f"bench_{name}"
