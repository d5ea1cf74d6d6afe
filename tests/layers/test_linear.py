"""Linear layers of a few rows on a CPU, whose results go by columns, and what follows them."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.embed_head import ParallelLMHead
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.linear import MAX_COLUMN_ROWS, ReplicatedLinear

ROWS = [0, 1, 2, 17, MAX_COLUMN_ROWS, MAX_COLUMN_ROWS + 1]


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    torch.manual_seed(0)
    return request.param


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", ROWS)
@torch.inference_mode()
def test_products_are_those_of_torch(num_rows: int, bias: bool, dtype: torch.dtype) -> None:
    layer = ReplicatedLinear(48, 80, bias)
    for parameter in layer.parameters():
        parameter.data = torch.randn(parameter.shape, dtype=dtype)
    strided = torch.randn(num_rows, 96, dtype=dtype)[:, 48:]
    for x in (strided, strided.contiguous(), strided.t().contiguous().t()):
        expected = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
        tolerance = 1e-4 if dtype is torch.float32 else 0.2  # of sums of 48 products of about 1
        torch.testing.assert_close(layer(x).double(), expected, rtol=0.01, atol=tolerance)


@pytest.mark.parametrize("num_rows", ROWS)
@torch.inference_mode()
def test_what_follows_goes_by_rows_again(num_rows: int) -> None:
    torch.manual_seed(0)
    gate_up, norm, head = ReplicatedLinear(32, 48), RMSNorm(48), ParallelLMHead(70, 32)
    for module in (gate_up, head):
        module.weight.data = torch.randn(module.weight.shape)
    x, residual = torch.randn(num_rows, 32), torch.randn(num_rows, 48)
    y = gate_up(x)
    activated = SiluAndMul()(y)
    assert activated.is_contiguous()
    torch.testing.assert_close(activated, F.silu(y[:, :24]) * y[:, 24:])
    normed, added = norm(y, residual)
    assert normed.is_contiguous() and added.is_contiguous()
    torch.testing.assert_close(added, y + residual)
    torch.testing.assert_close(normed, F.rms_norm(y + residual, (48,), eps=1e-6), rtol=1e-5, atol=1e-5)
    logits = head(x)
    assert logits.is_contiguous()
    torch.testing.assert_close(logits, F.linear(x, head.weight), rtol=1e-5, atol=1e-4)
