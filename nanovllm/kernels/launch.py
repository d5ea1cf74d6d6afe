"""Launches the kernels of this package, or only has them compiled; every wrapper in it launches through here.

Triton compiles a kernel when it is first launched, and version 3.6 a launcher in C for it as well. At a cold start that
would be some thirty compilations of half a second, one after the other; `compile_only` lets the
`ModelRunner` go through its steps once without running a kernel, while threads compile all that comes along.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

_MAX_THREADS = 8  # parts of the compiler hold Python's lock


class _Mode(threading.local):
    """Of each thread its own: two engines may start side by side in two threads."""

    def __init__(self) -> None:
        self.seen: set[Any] | None = None  # what `compile_only` has come across


_mode = _Mode()


def launch(kernel: triton.JITFunction, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`; inside `compile_only` the kernel is compiled for these arguments instead."""
    if _mode.seen is None:
        kernel[grid](*args, **options)
        return
    # Asking Triton takes a fraction of a millisecond, and all layers ask for the same.
    key = (kernel, *map(_kind, args), *((name, _kind(value)) for name, value in options.items()))
    if key not in _mode.seen:
        _mode.seen.add(key)
        kernel.warmup(*args, grid=grid, **options)


def _kind(arg: Any) -> Any:
    """Equal for two arguments only if the same compiled kernel serves both."""
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16
    if isinstance(arg, TensorDescriptor):
        return _kind(arg.base), tuple(arg.shape), tuple(arg.strides), tuple(arg.block_shape)
    return type(arg), arg


class _Compiler(ThreadPoolExecutor):
    """Threads that make each kernel they compile ready to run: its launcher, and the kernel on the device."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(min(os.cpu_count() or 1, _MAX_THREADS))
        self.device = device

    def submit(self, compile_kernel: Callable[[], Any]) -> Future:
        def compile_and_load() -> Any:
            compiled = compile_kernel()
            torch.cuda.set_device(self.device)  # each thread has its own
            compiled.run  # noqa: B018 (a property, which loads)
            return compiled

        return super().submit(compile_and_load)


@contextmanager
def compile_only(device: torch.device) -> Iterator[None]:
    """Kernels launched by this thread inside the block do not run; when it ends, all of them are ready to.

    What they would have written stays as it is, so whatever reads it, such as an index, must not rely on it.
    """
    _mode.seen = set()
    try:
        with _Compiler(device) as threads, triton.AsyncCompileMode(threads):
            yield
    finally:
        _mode.seen = None
