"""The products for a few rows, plain and with their prologues, against the layers that they stand for."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels.small_linear import MAX_ROWS, norm_linear, silu_mul_linear, small_linear
from nanovllm.layers.layernorm import RMSNorm

TOLERANCE = {
    torch.float32: {"rtol": 1e-4, "atol": 1e-4},
    torch.float16: {"rtol": 4e-3, "atol": 2e-2},
    torch.bfloat16: {"rtol": 3e-2, "atol": 1e-1},
}
SHAPES = [(64, 48), (96, 33), (100, 16), (4100, 5)]  # (inputs, outputs): odd sizes, and more inputs than a tile holds


@pytest.mark.parametrize("num_rows", range(1, MAX_ROWS + 1))
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_small_linear(num_rows: int, k: int, n: int, dtype: torch.dtype, randn: Callable[..., torch.Tensor]) -> None:
    x, weight, bias = randn(num_rows, k, dtype=dtype), randn(n, k, dtype=dtype), randn(n, dtype=dtype)
    for b in (None, bias):
        expected = F.linear(x.float(), weight.float(), None if b is None else b.float()).to(dtype)
        torch.testing.assert_close(small_linear(x, weight, b), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("num_rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_norm_linear(num_rows: int, k: int, n: int, dtype: torch.dtype, randn: Callable[..., torch.Tensor]) -> None:
    x, residual = randn(num_rows, k, dtype=dtype), randn(num_rows, k, dtype=dtype)
    before = x.clone(), residual.clone()
    norm = RMSNorm(k, eps=1e-5)
    norm.weight.data = randn(k, dtype=dtype)
    weight, bias = randn(n, k, dtype=dtype), randn(n, dtype=dtype)
    y, new_residual = norm_linear(x, residual, norm.weight, norm.eps, weight, bias)
    assert torch.equal(new_residual, x + residual)
    expected = F.linear(norm.normalize(x + residual).float(), weight.float(), bias.float()).to(dtype)
    torch.testing.assert_close(y, expected, **TOLERANCE[dtype])
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("num_rows", [1, 3, MAX_ROWS])
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_silu_mul_linear(num_rows: int, k: int, n: int, dtype: torch.dtype, randn: Callable[..., torch.Tensor]) -> None:
    x, weight = randn(num_rows, 2 * k, dtype=dtype), randn(n, k, dtype=dtype)
    expected = F.linear((F.silu(x[:, :k]) * x[:, k:]).float(), weight.float()).to(dtype)
    torch.testing.assert_close(silu_mul_linear(x, weight), expected, **TOLERANCE[dtype])


def test_rows_of_the_input_may_be_strided(randn: Callable[..., torch.Tensor]) -> None:
    wide, weight = randn(2, 100, dtype=torch.float32), randn(8, 64, dtype=torch.float32)
    expected = F.linear(wide[:, 10:74], weight)
    torch.testing.assert_close(small_linear(wide[:, 10:74], weight), expected, rtol=1e-4, atol=1e-4)
