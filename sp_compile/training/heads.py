"""What stands between a token's values and its logits, and which rows the tokens stand for: checked before any work."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from sp_compile.errors import InvalidInput, StaleForest
from sp_compile.layout.forest import Forest


@dataclasses.dataclass(frozen=True)
class VocabularyHead:
    """How logits are made of a token's values:

        x = values @ weight.T + bias        logits = softcap * tanh(scale * x / softcap) / temperature

    Attributes:
        weight: [V, H], of the dtype of the values; None: the values are logits already.
        bias: [V], or None.
        scale: multiplies logits before they are capped (Cohere's `logit_scale`, the inverse of Granite's `logits_scaling`).
        softcap: bound of the logits (Gemma 2's `final_logit_softcapping`), or None.
        temperature: of sampling, divides the capped logits.
    """

    weight: Tensor | None = None
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    temperature: float = 1.0

    def checked(self, values: Tensor, name: str) -> VocabularyHead:
        """The head with numbers as floats.

        Raises:
            InvalidInput: tensors that do not fit the values or one another, a scale that is no finite number, a softcap or a temperature
                that is no finite positive number.
        """
        if self.weight is None and self.bias is not None:
            raise InvalidInput(f"{name}: expected a bias together with a weight, got a bias alone; add it to the logits")
        for what, tensor, shape in (("weight", self.weight, (None, values.shape[-1])), ("bias", self.bias, (self.classes(values),))):
            if tensor is not None:
                _check_tensor(tensor, what, name)
                if len(tensor.shape) != len(shape) or any(a is not None and a != b for a, b in zip(shape, tensor.shape, strict=True)):
                    wanted = ", ".join("V" if size is None else str(size) for size in shape)
                    raise InvalidInput(f"{name}: expected {what} [{wanted}] for values {list(values.shape)}, got {list(tensor.shape)}")
                if tensor.device != values.device or not (tensor.dtype == values.dtype or _autocast_dtype(values)):
                    raise InvalidInput(
                        f"{name}: expected {what} of {values.dtype} on {values.device}, as the values, "
                        f"got {tensor.dtype} on {tensor.device}"
                    )
        numbers = {"scale": self.scale, "temperature": self.temperature} | ({} if self.softcap is None else {"softcap": self.softcap})
        for what, number in numbers.items():
            if isinstance(number, bool) or not isinstance(number, int | float) or not math.isfinite(number):
                raise InvalidInput(f"{name}: expected {what} to be a finite number, got {number!r}")
            if what != "scale" and number <= 0:
                raise InvalidInput(f"{name}: expected {what} to be larger than 0, got {number}")
        softcap = None if self.softcap is None else float(self.softcap)
        return dataclasses.replace(self, scale=float(self.scale), softcap=softcap, temperature=float(self.temperature))

    def classes(self, values: Tensor) -> int:
        """V."""
        return int(values.shape[-1] if self.weight is None else self.weight.shape[0])

    def cast(self, values: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Values, weight and bias in the dtype that autocast gives to the product; as they are without a product or autocast."""
        dtype = _autocast_dtype(values)
        if self.weight is None or dtype is None:
            return values, self.weight, self.bias
        return values.to(dtype), self.weight.to(dtype), None if self.bias is None else self.bias.to(dtype)

    def options(self, prefix: str = "") -> dict[str, Any]:
        """Numbers by name."""
        return {prefix + name: getattr(self, name) for name in ("scale", "softcap", "temperature")}


def _autocast_dtype(values: Tensor) -> torch.dtype | None:
    """The dtype of products under autocast, None where it is off or leaves the values alone."""
    kind = values.device.type
    if values.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return None
    return torch.get_autocast_dtype(kind)


def _check_tensor(value: object, what: str, name: str) -> None:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidInput(f"{name}: expected {what} to be a float tensor, got {got}")


def check_rows(values: Tensor, forest: Forest | None, name: str, what: str = "values") -> tuple[int, int]:
    """`(B, L)` of the rows that values [1, T, H] on a forest, or [B, L, H] without one, stand for.

    Raises:
        InvalidInput: no float tensor of three dimensions, no Forest, or dense values together with a forest.
        StaleForest: the forest has another number of tokens.
    """
    _check_tensor(values, what, name)
    if values.dim() != 3:
        raise InvalidInput(f"{name}: expected {what} [1, T, H] with a forest or [B, L, H] without one, got {list(values.shape)}")
    if forest is None:
        return values.shape[0], values.shape[1]
    if not isinstance(forest, Forest):
        raise InvalidInput(f"{name}: expected a Forest or None, got {type(forest).__name__}; sp_compile.pack makes one")
    if values.shape[0] != 1:
        raise InvalidInput(
            f"{name}: expected packed {what} [1, {forest.num_tokens}, ...] with a forest, got {list(values.shape)}; leave the forest out "
            "for dense values, whose gradient is one per row"
        )
    if values.shape[1] != forest.num_tokens:
        raise StaleForest(f"{name}: the forest has {forest.num_tokens} tokens, {what} have {values.shape[1]}")
    return forest.num_rows, forest.num_columns


def check_columns(tensor: Tensor, rows: int, columns: int, what: str, name: str) -> int:
    """The number of columns of a tensor [B, L] or [B, L - 1].

    Raises:
        InvalidInput: it has another shape.
    """
    if tensor.dim() != 2 or tensor.shape[0] != rows or tensor.shape[1] not in (columns, columns - 1):
        raise InvalidInput(f"{name}: expected {what} [{rows}, {columns}] or [{rows}, {columns - 1}], got {list(tensor.shape)}")
    return int(tensor.shape[1])


def chunk(size: int | None, what: str, name: str) -> int:
    """A chunk size as ops take it, 0 for "choose one".

    Raises:
        InvalidInput: it is no positive integer.
    """
    if size is None:
        return 0
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise InvalidInput(f"{name}: expected {what} to be a positive integer or None, got {size!r}")
    return size
