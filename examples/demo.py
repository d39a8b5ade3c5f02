"""One GRPO-style policy step, computed densely and with shared prefixes, side by side.

Prompts come from `reasoning-gym`, completions are sampled from a small random Qwen3. Both runs are compiled; the losses and all
gradients are compared, and the step time of both is measured. Exit code 0 and a last line that starts with `OK:` mean that the
batch was computed with its prompts present once and that every gradient agrees. Shapes below: B rows, L columns, V symbols.
"""

from __future__ import annotations

import argparse
import copy
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import reasoning_gym
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import sp_compile

PAD, STOP, VOCAB = 256, 257, 258  # tokens below PAD are bytes
TASKS = ("knights_knaves", "self_reference", "tower_of_hanoi", "number_sorting")
LOSS_TOLERANCE = 1e-5  # float32, relative
GRADIENT_TOLERANCE = 1e-4  # float32, whole model, relative L2 norm of a parameter's gradient


@dataclass(frozen=True)
class Sizes:
    """How large the demonstration is."""

    layers: int = 2
    hidden: int = 128
    prompts: int = 4
    completions: int = 8
    shortest: int = 40
    longest: int = 100
    prompt_bytes: int = 400
    steps: int = 3


@dataclass(frozen=True)
class Batch:
    """Rows of one policy step, padded on the right.

    Attributes:
        ids: [B, L] int64, prompt and completion; PAD behind the end of a row.
        mask: [B, L] int64, 1 on real tokens.
        trained: [B, L-1] bool, true where column l predicts a token of the completion.
        advantages: [B] float32, reward normalised within the group.
        old: [B, L-1] float32, log-probabilities under the policy that sampled.
    """

    ids: Tensor
    mask: Tensor
    trained: Tensor
    advantages: Tensor
    old: Tensor


@dataclass(frozen=True)
class Measured:
    """One way of running the step: loss, gradient by parameter name, median seconds of a step after compilation, seconds of the first."""

    loss: float
    gradients: dict[str, Tensor]
    seconds: float
    first_seconds: float


class Policy(nn.Module):
    """Log-probability of every next token, [B, L-1] float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        return torch.log_softmax(logits[:, :-1].float(), dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)


def build_model(sizes: Sizes) -> Qwen3ForCausalLM:
    """A random Qwen3 over bytes. The wide initialisation makes attention sharp, so that a wrong position would show."""
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=sizes.hidden,
        intermediate_size=3 * sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.hidden // 32,
        num_key_value_heads=max(1, sizes.hidden // 64),
        head_dim=32,
        initializer_range=0.1,
        pad_token_id=PAD,
        eos_token_id=STOP,
    )
    return Qwen3ForCausalLM(config)


def make_prompts(sizes: Sizes, seed: int) -> list[list[int]]:
    """Questions of different tasks as bytes, cut to at most `prompt_bytes`."""
    names = [TASKS[i % len(TASKS)] for i in range(sizes.prompts)]
    texts = [reasoning_gym.create_dataset(name, size=1, seed=seed + i)[0]["question"] for i, name in enumerate(names)]
    return [list(text.encode("utf-8")[: sizes.prompt_bytes]) for text in texts]


@torch.no_grad()
def sample(model: Qwen3ForCausalLM, prompts: list[list[int]], sizes: Sizes, seed: int) -> list[list[list[int]]]:
    """Completions per prompt, sampled from the model and cut at STOP or at a drawn length."""
    width = max(map(len, prompts))
    rows = [[PAD] * (width - len(prompt)) + prompt for prompt in prompts for _ in range(sizes.completions)]
    ids = torch.tensor(rows)
    out = model.generate(ids, attention_mask=(ids != PAD).long(), do_sample=True, max_new_tokens=sizes.longest, pad_token_id=PAD)
    draw = random.Random(seed)
    cut = []
    for row in out[:, width:].tolist():
        tokens = row[: draw.randint(sizes.shortest, sizes.longest)]
        cut.append(tokens[: tokens.index(STOP) + 1] if STOP in tokens else tokens)
    return [cut[i : i + sizes.completions] for i in range(0, len(cut), sizes.completions)]


def reward(completion: list[int]) -> float:
    """Share of printable ASCII: a stand-in that a random model can score on."""
    return sum(32 <= token < 127 for token in completion) / len(completion)


def build_batch(prompts: list[list[int]], completions: list[list[list[int]]]) -> Batch:
    """Pads the rows on the right and normalises rewards within each group; `old` is zero until `score_old` fills it."""
    rows = [(len(prompt), prompt + completion) for prompt, group in zip(prompts, completions, strict=True) for completion in group]
    width = max(len(row) for _, row in rows)
    ids = torch.tensor([row + [PAD] * (width - len(row)) for _, row in rows])
    lengths = torch.tensor([len(row) for _, row in rows])[:, None]
    starts = torch.tensor([start for start, _ in rows])[:, None]
    column = torch.arange(width)[None]
    predicted = column[:, 1:]
    rewards = torch.tensor([[reward(completion) for completion in group] for group in completions])
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
    trained = (predicted >= starts) & (predicted < lengths)
    return Batch(ids, (column < lengths).long(), trained, advantages.flatten(), torch.zeros(len(rows), width - 1))


@torch.no_grad()
def score_old(batch: Batch, model: nn.Module) -> Batch:
    """Log-probabilities of the sampling policy, which is slightly older than `model`, so that some ratios are clipped."""
    older = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(7)
    for parameter in older.parameters():
        parameter.add_(0.003 * torch.randn(parameter.shape, generator=generator))
    old = torch.cat([Policy(older)(ids, mask) for ids, mask in zip(batch.ids.split(8), batch.mask.split(8), strict=True)])
    return Batch(batch.ids, batch.mask, batch.trained, batch.advantages, old)


def objective(new: Tensor, batch: Batch, clip: float = 0.2) -> Tensor:
    """Clipped policy objective, mean over the trained tokens (Schulman et al. 2017, equation 7; group advantages as in GRPO).

    Args:
        new: [B, L-1] float32 log-probabilities under the policy being trained.
        batch: advantages, old log-probabilities and the mask of trained tokens.
        clip: half width of the interval the ratio is clipped to.
    """
    ratio = torch.exp((new - batch.old).masked_fill(~batch.trained, 0.0))
    advantages = batch.advantages[:, None]
    gain = torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    return -(gain * batch.trained).sum() / batch.trained.sum()


def measure(model: nn.Module, batch: Batch, backend: str, steps: int, tick: Callable[[], None]) -> Measured:
    """Compiles the policy with `backend`, runs `steps + 1` steps from the same parameters, and times all but the first."""
    policy = Policy(copy.deepcopy(model))
    compiled = torch.compile(policy, backend=backend)
    seconds = []
    for _ in range(steps + 1):
        policy.zero_grad(set_to_none=True)
        start = time.perf_counter()
        loss = objective(compiled(batch.ids, batch.mask), batch)
        loss.backward()
        seconds.append(time.perf_counter() - start)
        tick()
    gradients = {name: parameter.grad.clone() for name, parameter in policy.model.named_parameters() if parameter.grad is not None}
    return Measured(loss.item(), gradients, statistics.median(seconds[1:]), seconds[0])


def gradient_differences(dense: Measured, shared: Measured) -> dict[str, float]:
    """Relative L2 difference by parameter, largest first; infinite where only one run has a gradient or one is not finite."""
    found = {}
    for name in dense.gradients.keys() | shared.gradients.keys():
        if name in dense.gradients and name in shared.gradients:
            want = dense.gradients[name].double()
            difference = (shared.gradients[name].double() - want).norm() / want.norm().clamp_min(1e-12)
            found[name] = difference.item() if difference.isfinite() else float("inf")
        else:
            found[name] = float("inf")
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


def verdict(dense: Measured, shared: Measured, run: Any) -> tuple[bool, str]:
    """The last line, and whether it is a good one. `run` is what `sp_compile.last_run()` said after the shared steps, or None."""
    differences = gradient_differences(dense, shared)
    worst = next(iter(differences), "")
    if run is None:
        return False, "FAILED: the shared_prefix backend did not run"
    if run.refused:
        return False, f"FAILED: sharing was refused: {run.refused}"
    if not run.physical_tokens < run.logical_tokens:
        return False, f"FAILED: nothing was shared, {run.logical_tokens} logical tokens computed as {run.physical_tokens} physical"
    if not worst or not differences[worst] <= GRADIENT_TOLERANCE:
        return False, f"FAILED: gradients differ by {differences.get(worst, float('inf')):.1e} at {worst or 'no parameter'}"
    if not abs(dense.loss - shared.loss) <= LOSS_TOLERANCE * max(1.0, abs(dense.loss)):
        return False, f"FAILED: losses differ, {dense.loss:.8f} dense and {shared.loss:.8f} shared"
    counts = f"{run.logical_tokens} logical tokens computed as {run.physical_tokens} physical (I = {run.sharing:.2f})"
    return True, f"OK: {counts}, gradients agree to {differences[worst]:.1e}"


def report(console: Console, batch: Batch, dense: Measured, shared: Measured, run: Any) -> None:
    """Prints the comparison and the parameters whose gradients differ most."""
    table = Table(title="One policy step", title_justify="left")
    for heading in ("", "dense", "shared prefixes"):
        table.add_column(heading, justify="left" if not heading else "right")
    table.add_row("rows x columns", *[" x ".join(map(str, batch.ids.shape))] * 2)
    if run is not None:
        table.add_row("logical tokens", *[f"{run.logical_tokens:,}"] * 2)
        table.add_row("tokens computed", f"{batch.ids.numel():,}", f"{run.physical_tokens:,}")
    table.add_row("loss", f"{dense.loss:.8f}", f"{shared.loss:.8f}")
    table.add_row("first step with compilation", f"{dense.first_seconds:.1f} s", f"{shared.first_seconds:.1f} s")
    table.add_row("forward and backward, median", f"{1e3 * dense.seconds:.0f} ms", f"{1e3 * shared.seconds:.0f} ms")
    table.add_row("time, dense / shared", "", f"{dense.seconds / shared.seconds:.2f}")
    console.print(table)
    gradients = Table(title="Gradients that differ most", title_justify="left")
    gradients.add_column("parameter")
    gradients.add_column("relative difference", justify="right")
    for name, difference in list(gradient_differences(dense, shared).items())[:5]:
        gradients.add_row(name, f"{difference:.1e}")
    console.print(gradients)


def run_demo(backend: str, sizes: Sizes, console: Console, dense_backend: str = "inductor", seed: int = 0) -> tuple[bool, str]:
    """The whole demonstration; returns whether it went well and the line that says so."""
    torch.manual_seed(seed)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        work = progress.add_task("sampling completions", total=2 + 2 * (sizes.steps + 1))

        def tick() -> None:
            progress.advance(work)

        model = build_model(sizes).eval()
        prompts = make_prompts(sizes, seed)
        completions = sample(model, prompts, sizes, seed)
        tick()
        batch = score_old(build_batch(prompts, completions), model)
        tick()
        progress.update(work, description="dense step, compiling first")
        dense = measure(model, batch, dense_backend, sizes.steps, tick)
        progress.update(work, description="shared step, compiling first")
        shared = measure(model, batch, backend, sizes.steps, tick)
        progress.update(work, description="done")
    run = sp_compile.last_run()
    report(console, batch, dense, shared, run)
    return verdict(dense, shared, run)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One policy step, dense and with shared prefixes.")
    parser.add_argument("--backend", default="shared_prefix", help="backend of the second run (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=Sizes.layers)
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="timed steps of each run (default: %(default)s)")
    options = parser.parse_args(arguments)
    good, line = run_demo(options.backend, Sizes(layers=options.layers, steps=options.steps), Console())
    print(line, flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
