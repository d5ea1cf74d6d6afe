"""What the `ModelRunner` asks of PyTorch and the system about devices: which, which dtype, how much memory."""

import logging
import math
import os

import numpy as np
import torch

from nanovllm.config import Config
from nanovllm.utils.loader import checkpoint_dtype

logger = logging.getLogger("nanovllm")


def resolve_device(name: str, rank: int | None = None) -> torch.device:
    """The torch device behind `Config.device`, of one of several ranks if given; ValueError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and rank is not None:
        name = f"cuda:{rank}"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"device={name!r} is no device: {error}") from error
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={name!r}: torch sees no CUDA device; use device='cpu' or 'auto'")
        index = torch.cuda.current_device() if device.index is None else device.index
        if index >= torch.cuda.device_count():
            raise ValueError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
        device = torch.device("cuda", index)
    return device


def resolve_dtype(config: Config, device: torch.device) -> torch.dtype:
    """The dtype to compute in: the checkpoint's unless told otherwise, float32 on a CPU."""
    if config.dtype != "auto":
        return getattr(torch, config.dtype)
    if device.type == "cpu":
        logger.info("dtype='auto' on a CPU is float32")
        return torch.float32
    stored = config.model_config.dtype or checkpoint_dtype(config.model) or "bfloat16"
    return getattr(torch, stored)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeroed memory: a mask multiplies what it hides, and NaN times zero is NaN. On a CPU the system zeroes lazily."""
    if device.type == "cuda":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)


def available_memory() -> int:
    """Bytes of memory that new allocations can have without swapping, as far as the system tells."""
    try:
        with open("/proc/meminfo") as f:
            fields = dict(line.split(":") for line in f)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
