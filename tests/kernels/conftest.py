"""Fixtures of the kernel tests: the device they run on, its dtypes, and memory that is never accidentally right.

Without a GPU the kernels run in Triton's interpreter, whose `tl.dot` is wrong in bfloat16; with one they are compiled.
"""

from collections.abc import Callable

import pytest
import torch

HAS_CUDA = torch.cuda.is_available()
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * HAS_CUDA


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if HAS_CUDA else "cpu")


@pytest.fixture(params=DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """`torch.empty` hands out NaN (or a large integer), so that what a kernel fails to write shows in its result."""

    def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def empty(*args: object, **kwargs: object) -> torch.Tensor:
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan") if tensor.is_floating_point() else 2**30)

        return empty

    monkeypatch.setattr(torch, "empty", poisoned(torch.empty))
    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))


@pytest.fixture
def randn(device: torch.device) -> Callable[..., torch.Tensor]:
    """Seeded normal numbers: `randn(*shape, dtype)`."""
    generator = torch.Generator().manual_seed(0)

    def make(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device=device, dtype=dtype)

    return make
