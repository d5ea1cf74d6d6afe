"""silu_and_mul against PyTorch's silu and multiplication."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.silu_and_mul import silu_and_mul

TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.float16: {"rtol": 4e-3, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5},
}


@pytest.mark.parametrize(("num_tokens", "size"), [(1, 16), (3, 70), (2, 1024), (2, 2500)])
def test_silu_and_mul(num_tokens: int, size: int, dtype: torch.dtype, randn: Callable[..., torch.Tensor]) -> None:
    x = randn(num_tokens, 2 * size, dtype=dtype) * 3
    expected = F.silu(x[:, :size]) * x[:, size:]
    torch.testing.assert_close(silu_and_mul(x), expected, **TOLERANCE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter is NumPy: exp(1000) is inf
def test_rows_may_be_strided_and_extreme(randn: Callable[..., torch.Tensor]) -> None:
    wide = randn(3, 200, dtype=torch.float32) * 100
    x = wide[:, 5:145]
    torch.testing.assert_close(silu_and_mul(x), F.silu(x[:, :70]) * x[:, 70:], rtol=2e-6, atol=1e-6)
