"""Log-probabilities with compiled models: after one, on packed values, and inside of the compiled function."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor, nn

import sp_compile
from sp_compile.backend import shared_prefix
from sp_compile.layout import Forest
from sp_compile.training import VocabularyHead, group_advantages, group_mean, grpo_loss, next_tokens, token_kl, token_logprobs
from tests.e2e.compare import GRADIENTS, LOGITS, relative
from tests.e2e.models import spread
from tests.e2e.scenarios import VOCABULARY, both_padded, star, tree

OPTIONS = {"inner": "eager", "strict": True, "min_sharing": 1.0}


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """`(ids, mask, targets)` of two stars, left and right padded."""
    ids, mask, _ = both_padded([*star(seed=1, rows=3, prompt=9, completion=4), *star(seed=2, rows=4, prompt=3, completion=6)])
    return ids, mask, next_tokens(ids, mask)


class Step(nn.Module):
    """A decoder of one layer, and log-probabilities and entropies of its last hidden states, [B, L]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(64, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.lm_head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def hidden(self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor | None = None) -> Tensor:
        length = input_ids.shape[1]
        if position_ids is None:
            position_ids = torch.arange(length)[None]
        x = self.embed(input_ids) + self.places(position_ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        visible = torch.ones(length, length, dtype=torch.bool).tril() & attention_mask.bool()[:, None, None, :]
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        return self.norm(x + self.out(y.transpose(1, 2).flatten(2)))  # type: ignore[no-any-return]

    def forward(self, input_ids: Tensor, attention_mask: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(self.hidden(input_ids, attention_mask), targets, weight=self.lm_head.weight, entropy=True)


def plainly(step: Step, ids: Tensor, mask: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    whole = step.lm_head(step.hidden(ids, mask)).log_softmax(-1)
    picked = whole.gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    return picked * (targets != -100), -(whole.exp() * whole).sum(-1) * (targets != -100)


def check(step: Step, found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    gradients: list[dict[str, Tensor]] = []
    for logprobs, entropies in (found, wanted):
        step.zero_grad()
        (logprobs.square().sum() + entropies.square().sum()).backward()
        gradients.append({name: p.grad for name, p in step.named_parameters() if p.grad is not None})
    for one, other in zip(found, wanted, strict=True):
        assert relative(one.detach(), other.detach()) <= LOGITS
    assert gradients[0].keys() == gradients[1].keys()
    largest = max(float(g.norm()) for g in gradients[1].values())
    for name, gradient in gradients[1].items():
        assert relative(gradients[0][name], gradient, floor=1e-4 * largest) <= GRADIENTS, name


@pytest.fixture
def step() -> Step:
    torch._dynamo.reset()
    return spread(Step())  # type: ignore[return-value]


def test_after_a_compiled_model_in_dense_mode(step: Step) -> None:
    ids, mask, targets = batch()
    hidden = torch.compile(step.hidden, backend=shared_prefix, options=OPTIONS)(ids, mask)
    assert sp_compile.last_run().shared
    found = token_logprobs(hidden, targets, weight=step.lm_head.weight, entropy=True)
    check(step, found, plainly(step, ids, mask, targets))


def test_on_packed_values(step: Step) -> None:
    """Each token once, its head too; then the loss on rows."""
    ids, mask, targets = batch()
    call = torch.compile(lambda **inputs: step.lm_head(step.hidden(**inputs)), backend=shared_prefix, options=OPTIONS)
    packed = sp_compile.pack({"input_ids": ids, "attention_mask": mask})
    with sp_compile.share(packed.forest):
        logits = call(**packed.inputs)
    assert sp_compile.last_run().shared
    check(step, token_logprobs(logits, targets, packed.forest, entropy=True), plainly(step, ids, mask, targets))


@pytest.mark.parametrize("inner", ["eager", pytest.param("aot_eager", marks=pytest.mark.slow)])
def test_inside_of_a_compiled_function(step: Step, inner: str) -> None:
    call = torch.compile(step, backend=shared_prefix, options=OPTIONS | {"inner": inner}, fullgraph=True)
    batches = (batch(), both_padded(tree()))
    for ids, mask, _ in batches if inner == "eager" else batches[:1]:
        targets = next_tokens(ids, mask)
        found = call(ids, mask, targets)
        run = sp_compile.last_run()
        assert run.shared
        assert not run.refused
        assert not run.unpacked, "the head too works on physical tokens"
        assert run.physical_tokens == Forest.from_tokens(ids, keep=mask.bool()).num_tokens
        check(step, found, plainly(step, ids, mask, targets))


def test_inside_of_a_function_compiled_otherwise(step: Step) -> None:
    ids, mask, targets = batch()
    found = torch.compile(step, backend="aot_eager", fullgraph=True)(ids, mask, targets)
    check(step, found, plainly(step, ids, mask, targets))


def test_a_policy_step_on_packed_values_equals_the_dense_one(step: Step) -> None:
    """Log-probabilities, divergence from a frozen reference and loss, from packed hidden states and from dense logits."""
    ids, mask, targets = batch()
    counted, advantages = targets != -100, torch.tensor([1.0, -1.0, 0.5, 0.3, -0.2, 0.1, -2.0])
    packed = sp_compile.pack({"input_ids": ids, "attention_mask": mask})
    with sp_compile.share(packed.forest):
        hidden = torch.compile(step.hidden, backend=shared_prefix, options=OPTIONS)(**packed.inputs)
    weight = step.lm_head.weight
    frozen = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0))
    found = token_logprobs(hidden, targets, packed.forest, weight=weight)
    old = found.detach() + 0.3 * torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    heads = {"head": VocabularyHead(weight), "reference_head": VocabularyHead(weight.detach())}
    kl = token_kl(hidden, frozen, packed.forest, **heads, mask=counted)
    loss = grpo_loss(found, advantages, counted, old_logprobs=old).value + 0.1 * kl.sum()

    logits = step.lm_head(step.hidden(ids, mask))
    rows = sp_compile.unpack(frozen, packed.forest) @ weight.detach().T
    p, q = logits.log_softmax(-1), rows.log_softmax(-1)
    logprobs = p.gather(-1, targets.clamp(min=0)[..., None])[..., 0] * counted
    ratio = (logprobs - old * counted).exp()
    terms = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None]) * counted
    wanted = -(terms.sum(1) / counted.sum(1)).mean() + 0.1 * ((p.exp() * (p - q)).sum(-1) * counted).sum()
    check(step, (loss, found), (wanted, logprobs))


def test_inside_of_a_compiled_function_targets_at_padding_are_computed(step: Step) -> None:
    """Padding is dropped only where no target counts; here some do."""
    ids, mask, _ = batch()
    targets = ids.roll(-1, 1)
    found = torch.compile(step, backend=shared_prefix, options=OPTIONS, fullgraph=True)(ids, mask, targets)
    run = sp_compile.last_run()
    assert run.shared
    assert not run.unpacked
    check(step, found, plainly(step, ids, mask, targets))


def test_inside_of_a_compiled_function_with_shifted_inputs(step: Step) -> None:
    """`[:, :-1]` against `[:, 1:]`, a frozen head, and targets that the graph makes itself."""

    def call(ids: Tensor, mask: Tensor) -> Tensor:
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        return token_logprobs(step.hidden(ids, mask)[:, :-1], targets, weight=step.lm_head.weight.detach(), temperature=0.7)

    ids, mask, _ = batch()
    found = torch.compile(call, backend=shared_prefix, options=OPTIONS, fullgraph=True)(ids, mask)
    run = sp_compile.last_run()
    assert run.shared
    assert not run.unpacked
    counted = mask[:, 1:] != 0
    logits = torch.nn.functional.linear(step.hidden(ids, mask), step.lm_head.weight.detach())[:, :-1] / 0.7
    wanted = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0] * counted
    check(step, (found, found), (wanted, wanted))


def test_a_whole_policy_loss_inside_of_a_compiled_function(step: Step) -> None:
    """Log-probabilities, divergence from a frozen reference, advantages and the mean over groups in one graph."""
    ids, mask, targets = batch()
    rewards, groups = torch.tensor([1.0, 0.0, 0.5, 0.3, -0.2, 0.1, -2.0]), torch.tensor([5, 5, 5, 2, 2, 2, 2])
    old = torch.randn(targets.shape, generator=torch.Generator().manual_seed(1)) * 0.1 - 3
    weight = step.lm_head.weight

    def call(ids: Tensor, mask: Tensor, targets: Tensor, old: Tensor, rewards: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
        hidden, counted = step.hidden(ids, mask), targets != -100
        found = token_logprobs(hidden, targets, weight=weight)
        reduce = functools.partial(group_mean, groups=groups)
        heads = {"head": VocabularyHead(weight), "reference_head": VocabularyHead(weight.detach())}
        kl = token_kl(hidden, hidden.detach().tanh(), **heads, mask=counted)
        loss = grpo_loss(found, group_advantages(rewards, groups), counted, old_logprobs=old, reduce=reduce).value
        return loss + 0.1 * reduce(kl, counted), kl

    given = (ids, mask, targets, old, rewards, groups)
    wanted = call(*given)
    found = torch.compile(call, backend=shared_prefix, options=OPTIONS, fullgraph=True)(*given)
    run = sp_compile.last_run()
    assert run.shared
    assert all(" for sum" in entry for entry in run.unpacked), "sums over each row read one number per position"
    check(step, found, wanted)
