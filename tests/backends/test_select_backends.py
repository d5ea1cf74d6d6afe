"""Which backend is chosen, what is logged about it, and what a user reads when the choice cannot be had."""

import logging
import sys
from types import ModuleType

import pytest
import torch

from nanovllm.backends import BACKENDS, select_backends
from nanovllm.backends.flash_attn_backend import FlashAttnBackend, _probe
from nanovllm.backends.torch_backend import TorchBackend
from nanovllm.backends.triton_backend import TritonBackend

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HEADS = (4, 2, 64)  # num_heads, num_kv_heads, head_dim


def select(
    spec: str, device: torch.device = CPU, dtype: torch.dtype = torch.bfloat16, block_size: int = 256
) -> list[str]:
    return [backend.name for backend in select_backends(spec, device, dtype, *HEADS, block_size)]


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As far as selection can see: a GPU of capability 9.0, and a flash_attn that imports and runs."""
    module = ModuleType("flash_attn")
    module.flash_attn_varlen_func = lambda *args, **kwargs: torch.zeros(1)
    module.flash_attn_with_kvcache = lambda *args, **kwargs: torch.zeros(1, 1)
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    zeros, tensor = torch.zeros, torch.tensor
    monkeypatch.setattr(torch, "zeros", lambda *args, device=None, **kwargs: zeros(*args, **kwargs))
    monkeypatch.setattr(torch, "tensor", lambda *args, device=None, **kwargs: tensor(*args, **kwargs))
    _probe.cache_clear()
    yield module
    _probe.cache_clear()


def break_import(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Makes `import flash_attn` raise, as a binary that was built for another torch does."""

    class Finder:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "flash_attn":
                raise error

    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])


def test_cpu_takes_torch_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        prefill, decode = select_backends("auto", CPU, torch.float32, *HEADS, 16)
    assert isinstance(prefill, TorchBackend) and decode is prefill
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "attention backend: prefill torch, decode torch")
    ]


def test_one_name_or_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert select("triton") == ["triton", "triton"]
    assert select("torch, triton") == ["torch", "triton"]
    assert select("triton,auto") == ["triton", "torch"]


@pytest.mark.parametrize("spec", ["", "flash", "torch,", "torch,flash", "torch,torch,torch", "Torch"])
def test_unknown_names_list_the_known_ones(spec: str) -> None:
    with pytest.raises(ValueError) as error:
        select(spec)
    for word in (f"attention_backend={spec!r}", "auto", *BACKENDS):
        assert word in str(error.value)


@pytest.mark.parametrize("spec", ["flash_attn", "torch,flash_attn"])
def test_a_named_backend_that_is_unavailable_raises_with_the_reason(spec: str) -> None:
    with pytest.raises(ValueError, match="flash_attn: it needs a CUDA device, not cpu"):
        select(spec)


def test_triton_needs_a_gpu_or_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ValueError, match="triton: it needs a CUDA device, not cpu"):
        select("triton")


def test_triton_needs_a_new_enough_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (7, 5))
    assert "8.0" in TritonBackend.unavailable_reason(CUDA, torch.float16, *HEADS, 256)


def test_triton_must_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert TritonBackend.unavailable_reason(CUDA, torch.float16, *HEADS, 256) == "triton is not installed"


@pytest.mark.parametrize("spec", ["auto", "torch", "triton"])
@pytest.mark.parametrize("block_size", [8, 24, 1])
def test_block_sizes_are_multiples_of_16(spec: str, block_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=f"kvcache_block_size={block_size} is not a multiple of 16"):
        select(spec, block_size=block_size)


def test_flash_attn_wants_blocks_of_256_and_half_precision(fake_gpu: ModuleType) -> None:
    with pytest.raises(ValueError, match="kvcache_block_size=128 is not a multiple of 256"):
        select("flash_attn", CUDA, block_size=128)
    with pytest.raises(ValueError, match="float16 or bfloat16, not float32"):
        select("flash_attn", CUDA, torch.float32)
    assert select("flash_attn", CUDA, block_size=512) == ["flash_attn", "flash_attn"]


def test_auto_reads_the_table_of_the_capability(
    fake_gpu: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        assert select("auto", CUDA) == ["triton", "triton"]
    assert [record.levelname for record in caplog.records] == ["INFO"]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 6))
    assert select("auto", CUDA) == ["flash_attn", "flash_attn"]
    assert select("auto,torch", CUDA) == ["flash_attn", "torch"]


@pytest.mark.parametrize(
    "error", [OSError("undefined symbol: _ZN3c10"), ImportError("No module named 'flash_attn'"), RuntimeError()]
)
def test_pitfall_66_a_broken_flash_attn_falls_back_and_says_so_once(
    error: Exception, fake_gpu: ModuleType, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    break_import(monkeypatch, error)
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        assert select("auto", CUDA) == ["triton", "triton"]
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("attention backend: prefill triton, decode triton; not flash_attn (importing")
    assert type(error).__name__ in record.getMessage() and str(error) in record.getMessage()
    with pytest.raises(ValueError, match=f"importing flash_attn failed: {type(error).__name__}"):
        select("flash_attn", CUDA)


def test_flash_attn_that_imports_but_cannot_run_is_found_out(fake_gpu: ModuleType) -> None:
    calls = []

    def fail(*args: object, **kwargs: object) -> None:
        calls.append(kwargs)
        raise RuntimeError("head dim 64 is not compiled in\nand more lines")

    fake_gpu.flash_attn_with_kvcache = fail
    with pytest.raises(ValueError, match=r"a trial call failed: RuntimeError: head dim 64 is not compiled in\)"):
        select("flash_attn", CUDA)
    reason = FlashAttnBackend.unavailable_reason(CUDA, torch.bfloat16, *HEADS, 256)
    assert "not compiled in" in reason
    assert len(calls) == 1, "the trial runs once"


@pytest.mark.gpu
def test_a_real_gpu_gets_a_gpu_backend() -> None:
    assert "torch" not in select("auto", torch.device("cuda"))
