"""What stands at the head of every result file: date, hardware, versions and command."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch


def _processor() -> str:
    found = Path("/proc/cpuinfo")
    if found.exists():
        for line in found.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def load_average() -> list[float]:
    """The machine's load averages: results taken under foreign load should be seen as such."""
    return [round(value, 2) for value in os.getloadavg()]


def header() -> dict[str, Any]:
    """Date, hardware, versions and command."""
    main = sys.modules["__main__"]
    module = getattr(getattr(main, "__spec__", None), "name", None) or Path(sys.argv[0]).name
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", module, *sys.argv[1:]]),
        "hardware": {"processor": _processor(), "cores": os.cpu_count(), "capability": torch.backends.cpu.get_cpu_capability()},
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("torch", "transformers", "numpy")},
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """The header and the results as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(header() | results, indent=2) + "\n")
