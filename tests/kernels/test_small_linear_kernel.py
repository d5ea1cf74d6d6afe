"""The products for a few rows, plain and with what is fused into them, against the layers that they stand for."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from nanovllm.kernels import skinny_linear as skinny
from nanovllm.kernels import small_linear as small
from nanovllm.kernels.skinny_linear import skinny_linear
from nanovllm.kernels.small_linear import MAX_ROWS, small_linear

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


def gate(y: torch.Tensor, gated: bool) -> torch.Tensor:
    """silu(first half) * second half of the columns."""
    return F.silu(y[:, : y.shape[1] // 2]) * y[:, y.shape[1] // 2 :] if gated else y


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS])
@pytest.mark.parametrize("has_bias", [False, True])
def test_gated(num_rows: int, has_bias: bool, dtype: torch.dtype, randn: Callable[..., torch.Tensor]) -> None:
    for k, n in SHAPES:
        x, weight = randn(num_rows, k, dtype=dtype), randn(2 * n, k, dtype=dtype) / k**0.5
        bias = randn(2 * n, dtype=dtype) if has_bias else None
        expected = gate(F.linear(x.float(), weight.float(), None if bias is None else bias.float()), True).to(dtype)
        torch.testing.assert_close(small_linear(x, weight, bias, gated=True), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("num_rows", "has_bias"), [(3, False), (skinny.MAX_ROWS, True)])
@pytest.mark.parametrize(("k", "n"), [*SHAPES, (16, 8), (2048, 24), (3072, 9)])
def test_skinny_linear(
    num_rows: int, has_bias: bool, gated: bool, k: int, n: int, dtype: torch.dtype, randn: Callable[..., torch.Tensor]
) -> None:
    """Slices and chunks that K fills in part, several chunks, blocks that N fills in part."""
    x, weight = randn(num_rows, k, dtype=dtype), randn(2 * n if gated else n, k, dtype=dtype) / k**0.5
    bias = randn(len(weight), dtype=dtype) if has_bias else None
    expected = gate(F.linear(x.float(), weight.float(), None if bias is None else bias.float()), gated).to(dtype)
    torch.testing.assert_close(skinny_linear(x, weight, bias, gated), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("k", [48, 64, 100])
def test_large_matrices_are_taken_in_chunks(
    k: int, gated: bool, dtype: torch.dtype, randn: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(small, "LARGE_ELEMENTS", 0)
    monkeypatch.setattr(small, "CHUNK", 32)
    x, weight, bias = randn(1, k, dtype=dtype), randn(10, k, dtype=dtype) / k**0.5, randn(10, dtype=dtype)
    expected = gate(F.linear(x.float(), weight.float(), bias.float()), gated).to(dtype)
    torch.testing.assert_close(small_linear(x, weight, bias, gated), expected, **TOLERANCE[dtype])


def test_rows_of_the_input_may_be_strided(randn: Callable[..., torch.Tensor]) -> None:
    wide, weight = randn(2, 100, dtype=torch.float32), randn(8, 64, dtype=torch.float32)
    expected = F.linear(wide[:, 10:74], weight)
    torch.testing.assert_close(small_linear(wide[:, 10:74], weight), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(skinny_linear(wide[:, 10:74], weight), expected, rtol=1e-4, atol=1e-4)
