"""How calls of other libraries become marked nodes of the captured graph: one file per library function family."""

from sp_compile.capture import hf_attention, hf_masks, hf_methods, hf_outputs, hf_scans, input_hooks, kernel_scans, log_calls, torch_modules
from sp_compile.capture.polyfills import add_scan, install, is_ours, set_backend, unset_backend
from sp_compile.capture.versions import require_tested

__all__ = ["add_scan", "install", "is_ours", "require_tested", "set_backend", "unset_backend"]

for _module in (hf_attention, hf_masks, hf_methods, hf_outputs, hf_scans, input_hooks, kernel_scans, log_calls, torch_modules):
    add_scan(_module.scan)
