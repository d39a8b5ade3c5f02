"""How the rows of a batch share their prefixes: plain data, numpy on the host, tensors on the device by name."""

from __future__ import annotations

from sp_compile.layout.cache import BoundedCache
from sp_compile.layout.forest import Forest
from sp_compile.layout.tensors import register, registered

__all__ = ["BoundedCache", "Forest", "register", "registered"]
