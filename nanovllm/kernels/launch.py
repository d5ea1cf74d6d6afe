"""Launches the kernels of this package, or only has them compiled; every wrapper in it launches through here.

Triton compiles a kernel when it is first launched. At a cold start that would be some twenty compilations of half a
second, one after the other; `compile_only` lets the `ModelRunner` go through its steps once without running a kernel,
while threads compile all that comes along.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import triton

_MAX_THREADS = 8  # parts of the compiler hold Python's lock

_mode = threading.local()


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`; inside `compile_only` the kernel is compiled for these arguments instead."""
    if getattr(_mode, "compile_only", False):
        kernel.warmup(*args, grid=grid, **options)
    else:
        kernel[grid](*args, **options)


@contextmanager
def compile_only() -> Iterator[None]:
    """Kernels launched by this thread inside the block do not run; when it ends, all of them are compiled.

    What they would have written stays as it is, so whatever reads it, such as an index, must not rely on it.
    """
    _mode.compile_only = True
    try:
        with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_THREADS)) as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        _mode.compile_only = False
