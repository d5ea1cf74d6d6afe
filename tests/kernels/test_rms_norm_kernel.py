"""rms_norm and add_rms_norm against transformers' formula, rounding included."""

from collections.abc import Callable

import pytest
import torch

from nanovllm.kernels.rms_norm import add_rms_norm, rms_norm

EPS = 1e-6
# One unit in the last place may flip at each of the two roundings: the GPU's rsqrt is not PyTorch's.
TOLERANCE = {
    torch.float32: {"rtol": 2e-6, "atol": 1e-6},
    torch.float16: {"rtol": 4e-3, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5},
}
SHAPES = [(1, 64), (3, 100), (5, 1024), (2, 1)]


def reference_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)).to(x.dtype)


@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape: tuple[int, int], dtype: torch.dtype, randn: Callable[..., torch.Tensor]) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    before = x.clone()
    out = rms_norm(x, weight, EPS)
    torch.testing.assert_close(out, reference_norm(x, weight), **TOLERANCE[dtype])
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_add_rms_norm(shape: tuple[int, int], dtype: torch.dtype, randn: Callable[..., torch.Tensor]) -> None:
    x, residual, weight = randn(*shape, dtype=dtype), randn(*shape, dtype=dtype), randn(shape[1], dtype=dtype)
    before = x.clone(), residual.clone()
    out, new_residual = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(new_residual, x + residual)
    torch.testing.assert_close(out, reference_norm(x + residual, weight), **TOLERANCE[dtype])
    assert torch.equal(x, before[0]) and torch.equal(residual, before[1])
    assert out.data_ptr() != new_residual.data_ptr()


def test_rows_may_be_strided(randn: Callable[..., torch.Tensor]) -> None:
    wide, weight = randn(4, 200, dtype=torch.float32), randn(64, dtype=torch.float32)
    x, residual = wide[:, 10:74], wide[:, 100:164]
    out, new_residual = add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(new_residual, x + residual)
    torch.testing.assert_close(out, reference_norm(x + residual, weight), **TOLERANCE[torch.float32])
    torch.testing.assert_close(rms_norm(x, weight, EPS), reference_norm(x, weight), **TOLERANCE[torch.float32])


def test_large_values_do_not_overflow(randn: Callable[..., torch.Tensor]) -> None:
    x, weight = randn(2, 64, dtype=torch.float32).mul(1e3).half(), randn(64, dtype=torch.float16)
    torch.testing.assert_close(rms_norm(x, weight, EPS), reference_norm(x, weight), **TOLERANCE[torch.float16])
