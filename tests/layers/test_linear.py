"""Linear layers with weights in oneDNN's layout: where they are used, and that they give the same products."""

import pytest
import torch
import torch.nn.functional as F

from nanovllm.layers.linear import LinearBase, MergedColumnParallelLinear, QKVParallelLinear, ReplicatedLinear

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def make(dtype: torch.dtype = torch.float32, bias: bool = False) -> list[LinearBase]:
    torch.manual_seed(0)
    layers = [
        ReplicatedLinear(48, 80, bias),
        MergedColumnParallelLinear(64, [96, 96], bias),
        QKVParallelLinear(64, 16, 4, 2, bias),
    ]
    for layer in layers:
        for parameter in layer.parameters():
            parameter.data = torch.randn(parameter.shape, dtype=dtype)
    return layers


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_packed_weights_give_the_same_products(bias: bool) -> None:
    for layer in make(bias=bias):
        weight = layer.weight.data.clone()
        layer.pack()
        assert layer.weight.is_mkldnn and layer.weight.shape == weight.shape
        for num_rows in (0, 1, 2, 17, 300):
            x = torch.randn(num_rows, 2 * weight.shape[1])[:, ::2][:, : weight.shape[1]]  # strided
            torch.testing.assert_close(layer(x), F.linear(x, weight, layer.bias), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_only_float32_is_packed(dtype: torch.dtype) -> None:
    for layer in make(dtype):
        layer.pack()
        assert not layer.weight.is_mkldnn


def test_without_onednn_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    for layer in make():
        layer.pack()
        assert not layer.weight.is_mkldnn
