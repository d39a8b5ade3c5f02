"""A torch.compile backend that computes each shared prefix of a batch once: `torch.compile(model, backend="shared_prefix")`."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

from sp_compile.errors import (
    CannotShare,
    InvalidForest,
    InvalidInput,
    InvalidOption,
    InvalidShards,
    LayoutNotAccepted,
    MissingPackage,
    NoImplementation,
    NothingToShare,
    RanksDisagree,
    SharedPrefixError,
    StageError,
    StaleForest,
    StaleRoute,
    UnsupportedVersion,
)

if TYPE_CHECKING:
    from sp_compile.debug.account import last_run
    from sp_compile.debug.explain import explain
    from sp_compile.layout.forest import Forest
    from sp_compile.sharing import Packed, pack, share, unpack
    from sp_compile.training.logprobs import token_logprobs

__all__ = [
    "CannotShare",
    "Forest",
    "InvalidForest",
    "InvalidInput",
    "InvalidOption",
    "InvalidShards",
    "LayoutNotAccepted",
    "MissingPackage",
    "NoImplementation",
    "NothingToShare",
    "Packed",
    "RanksDisagree",
    "SharedPrefixError",
    "StageError",
    "StaleForest",
    "StaleRoute",
    "UnsupportedVersion",
    "__version__",
    "explain",
    "last_run",
    "pack",
    "share",
    "token_logprobs",
    "unpack",
]

try:
    __version__ = importlib.metadata.version("sp-compile")
except importlib.metadata.PackageNotFoundError:  # a checkout on the path, not installed
    __version__ = "0+unknown"

# Imported on first use: they import torch, which importing the package alone does not.
_LAZY = {"Forest": "layout.forest", "explain": "debug.explain", "last_run": "debug.account", "token_logprobs": "training.logprobs"}
_LAZY |= dict.fromkeys(("Packed", "pack", "share", "unpack"), "sharing")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
