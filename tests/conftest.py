"""Skips what needs accelerators that are not there; everything outside those two folders needs none."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent
ACCELERATORS = {HERE / "gpu": 1, HERE / "distributed_gpu": 2}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for folder, needed in ACCELERATORS.items():
        inside = [item for item in items if folder in item.path.parents]
        if inside:
            import torch

            found = torch.cuda.device_count()
            if found < needed:
                for item in inside:
                    item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA devices, found {found}"))
