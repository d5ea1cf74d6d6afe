"""Launches the kernels of this package, or only has them compiled; every wrapper in it launches through here.

Triton compiles a kernel when it is first launched, and before version 3.7 a launcher in C for it as well. At a cold
start that would be some thirty compilations of half a second, one after the other; `compile_only` lets the
`ModelRunner` go through its steps once without running a kernel, while threads compile all that comes along.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton

_MAX_THREADS = 8  # parts of the compiler hold Python's lock


class _Mode(threading.local):
    """Of each thread its own: two engines may start side by side in two threads."""

    def __init__(self) -> None:
        self.compiling: dict[int, Any] | None = None  # what `compile_only` has come across, by identity


_mode = _Mode()


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`; inside `compile_only` the kernel is compiled for these arguments instead."""
    if _mode.compiling is None:
        kernel[grid](*args, **options)
    else:
        compiled = kernel.warmup(*args, grid=grid, **options)
        _mode.compiling[id(compiled)] = compiled


@contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
    """Kernels launched by this thread inside the block do not run; when it ends, all of them are ready to.

    What they would have written stays as it is, so whatever reads it, such as an index, must not rely on it.
    """

    def load(compiled: Any) -> None:
        torch.cuda.set_device(device)  # each thread has its own
        getattr(compiled, "result", lambda: compiled)().run  # noqa: B018 (its launcher, and the kernel on the device)

    _mode.compiling = {}
    try:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as threads:
            with triton.AsyncCompileMode(threads):
                yield
            list(threads.map(load, _mode.compiling.values()))
    finally:
        _mode.compiling = None
