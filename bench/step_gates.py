"""When a step of `bench.step` is right enough to be timed."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

GATE = 1.25  # of the dense run's error against float32
BASELINE_GATE = 2.0  # theirs add gradients in bf16 where the compiled ones do not
LOSS_FLOOR = 5e-4  # relative, added: one number can be right by chance
EACH = 2.0  # of the dense run's error of one parameter's gradient, where tokens that go to another expert weigh more
EACH_FLOOR = 2e-3  # relative L2, added
FLOOR = 2e-5  # relative L2 of all gradients, added: what float32 may differ


@dataclasses.dataclass(frozen=True)
class Errors:
    """Of a run against float32: of the loss, relative; of all gradients, relative L2; and of each parameter's."""

    loss: float
    gradients: float
    each: dict[str, float]

    @staticmethod
    def of(found: tuple[Tensor, dict[str, Tensor]], wanted: tuple[Tensor, dict[str, Tensor]]) -> Errors:
        loss, gradients = found
        each, wrong, whole = {}, 0.0, 0.0
        largest = max(float(g.norm()) for g in wanted[1].values())
        for name, want in wanted[1].items():
            norm = float(want.norm())
            error = float((gradients[name].float() - want).norm()) if name in gradients else norm
            wrong, whole = wrong + error**2, whole + norm**2
            each[name] = error / max(norm, 1e-4 * largest)
        return Errors(float((loss.double() - wanted[0].double()).abs() / wanted[0].double().abs()), (wrong / whole) ** 0.5, each)

    def beyond(self, dense: Errors, gate: float = GATE) -> list[str]:
        """Why these are not the errors of a right run, given those of the dense one; NaN never passes."""
        said = []
        if not self.loss <= gate * dense.loss + LOSS_FLOOR:
            said.append(f"loss is off by {self.loss:.1e}, dense by {dense.loss:.1e}")
        if not self.gradients <= gate * dense.gradients + FLOOR:
            said.append(f"gradients are off by {self.gradients:.2e}, dense by {dense.gradients:.2e}")
        for name, error in self.each.items():
            if not error <= max(gate, EACH) * dense.each[name] + EACH_FLOOR:
                said.append(f"gradient of {name} is off by {error:.2e}, dense by {dense.each[name]:.2e}")
        return said


def wrong_counts(out: dict[str, Tensor]) -> list[str]:
    """Whether each expert was counted exactly as often as the tokens of all rows chose it."""
    if "counts" not in out:
        return []
    counts, chosen = out["counts"].cpu(), out["chosen"].cpu()
    want = torch.stack([torch.bincount(layer.flatten(), minlength=counts.shape[1]) for layer in chosen])
    return [] if torch.equal(counts, want) else [f"experts are counted wrong by up to {int((counts - want).abs().max())}"]


def wrong_run(run: Any, tokens: int, sharing: float) -> list[str]:
    """Whether the shared call, as its account says, did what it had to with a batch of so many physical tokens."""
    expected = sharing >= 1.1
    said = [f"refused: {reason}" for reason in run.refused]
    if run.shared != expected or run.physical_tokens != (tokens if expected else run.logical_tokens):
        said.append(f"shared is {run.shared} with {run.physical_tokens} physical tokens, expected {expected} and {tokens}")
    return said
