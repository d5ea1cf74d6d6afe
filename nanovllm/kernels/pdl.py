"""Programmatic dependent launch (compute capability 9.0 and newer): a kernel starts while the one before it still runs.

A decode step is a chain of kernels of a few microseconds, and between two of them the GPU drains and refills. With this
attribute a kernel's programs are placed as soon as all programs of its predecessor have said `let_next_start`; they
prepare what depends on nothing (addresses, weights) and then `wait_for_inputs`.

The rule: every kernel calls `wait_for_inputs` before it reads what an earlier kernel wrote and before its first write.
The wait ends when the predecessor has completed, and that one waited for its own, so the chain stays ordered.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Allow the next kernel's programs to be placed beside this kernel's last ones."""
    if PDL:
        gdc_launch_dependents()


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait until all that earlier kernels wrote is there."""
    if PDL:
        gdc_wait()


@cache
def pdl_options(device: torch.device) -> dict[str, bool]:
    """Launch arguments of a kernel that has a `PDL` switch."""
    supported = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    if not supported or os.environ.get("NANOVLLM_NO_PDL") == "1":
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
