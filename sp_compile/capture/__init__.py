"""How calls of other libraries become marked nodes of the captured graph: one file per library function family."""

from sp_compile.capture import hf_attention, hf_masks, hf_outputs, input_hooks, log_calls
from sp_compile.capture.polyfills import add_scan, install, is_ours, set_backend, unset_backend
from sp_compile.capture.versions import require_tested

__all__ = ["add_scan", "install", "is_ours", "require_tested", "set_backend", "unset_backend"]

for _scan in (hf_attention.scan, hf_masks.scan, hf_outputs.scan, input_hooks.scan, log_calls.scan):
    add_scan(_scan)
