"""Losses of Hugging Face models on physical tokens: the library's own, and one written by hand on its logits."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

from tests.passes.harness import batch, compare, show
from tests.passes.test_sink_unpacking import LABELS, PASS, WORDS


def _llama() -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(vocab_size=WORDS, use_cache=False, **sizes)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


class WithLabels(nn.Module):
    """Hugging Face's own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _llama()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=ids, labels=labels).loss
        return loss


class WithOwnLoss(nn.Module):
    """A policy loss written by hand on `logits[:, :-1]`."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _llama()

    def forward(self, ids: Tensor, advantages: Tensor) -> Tensor:
        logits = self.model(input_ids=ids).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
        probabilities = logits.softmax(-1)
        entropy = logits.logsumexp(-1) - (probabilities * logits).sum(-1)
        return -(logprobs * advantages[:, 1:]).mean() - 0.01 * entropy.mean()


def renumbered(text: str) -> str:
    """Names with their numbers counted anew, and the head's input by one name: the nodes before depend on the library's version."""
    text = re.sub(r"^logits = linear\(\w+, ", "logits = linear(hidden, ", text)
    seen: dict[str, dict[str, int]] = {}

    def number(match: re.Match[str]) -> str:
        found = seen.setdefault(match[1], {})
        count = found.setdefault(match[0], len(found))
        return f"{match[1]}_{count}"

    return re.sub(r"\b([a-z][a-z_]*)_(\d+)\b", number, text)


def test_hugging_face_loss_is_a_loss_of_tokens() -> None:
    error, found = compare(WithLabels(), batch(), LABELS)
    assert error < 1e-5  # the library computes this loss in float32
    assert_expected_inline(
        renumbered(show(found.after[PASS], "logits")),
        """\
logits = linear(hidden, l_self_modules_model_modules_lm_head_parameters_weight_, None)
logits_0 = float(logits)
labels = pad(l_labels_, [0, 1], 'constant', -100)
getitem_0 = getitem(labels, [Ellipsis, 1:])
shift_labels = contiguous(getitem_0)
logits_1 = view(logits_0, -1, 50)
shift_labels_0 = view(shift_labels, -1)
shift_labels_1 = to(shift_labels_0, device(type='cpu'))
flatten = flatten(forest_index, 0, 1)
cross_entropy_rows_default = sp_compile.cross_entropy_rows(logits_1, flatten, shift_labels_1, None, ignore_index=-100, label_smoothing=0.0)
getitem = getitem(cross_entropy_rows_default, 0)
getitem_1 = getitem(cross_entropy_rows_default, 1)
weighted_mean = weighted_mean(getitem, getitem_1)
return [weighted_mean]
""",
    )


def test_policy_loss_on_sliced_logits_needs_no_rows_of_logits() -> None:
    error, found = compare(WithOwnLoss(), batch(), torch.randn(4, 14, dtype=torch.float64))
    assert error < 1e-6  # the library's norm runs in float32
    assert_expected_inline(
        renumbered(show(found.after[PASS], "logits")),
        """\
logits = linear(hidden, l_self_modules_model_modules_lm_head_parameters_weight_, None)
getitem = getitem(forest_index, [:, :-1])
log_softmax_0 = log_softmax(logits, -1)
getitem_0 = getitem(l_ids_, [:, 1:, None])
unsqueeze = unsqueeze(getitem, -1)
flatten = flatten(log_softmax_0, 0, 1)
take_tokens_default = sp_compile.take_tokens(flatten, unsqueeze, getitem_0)
logprobs = squeeze(take_tokens_default, -1)
softmax = softmax(logits, -1)
logsumexp_0 = logsumexp(logits, -1)
mul = mul(softmax, logits)
sum_0 = sum(mul, -1)
sub = sub(logsumexp_0, sum_0)
flatten_0 = flatten(sub, 0, 1)
unpack_default = sp_compile.unpack(flatten_0, getitem)
getitem_1 = getitem(l_advantages_, [:, 1:])
mul_0 = mul(logprobs, getitem_1)
mean_0 = mean(mul_0)
neg_0 = neg(mean_0)
mean_1 = mean(unpack_default)
mul_1 = mul(0.01, mean_1)
sub_0 = sub(neg_0, mul_1)
return [sub_0]
""",
    )
    assert found.context.unpacked == ["entropy for mean_4"]
