"""Choice of the attention backends: the registry of names and `select_backends`, which `ModelRunner` calls at start.

A backend's module is imported when the backend is considered, so that importing this package costs nothing more.
"""

import importlib
import logging

import torch

from nanovllm.backends.base import AttentionBackend

__all__ = ["BACKENDS", "AttentionBackend", "select_backends"]

logger = logging.getLogger("nanovllm")

BACKENDS = {
    "flash_attn": ("nanovllm.backends.flash_attn_backend", "FlashAttnBackend"),
    "torch": ("nanovllm.backends.torch_backend", "TorchBackend"),
    "triton": ("nanovllm.backends.triton_backend", "TritonBackend"),
}
PHASES = ("prefill", "decode")

# What "auto" tries, best first, for each phase. Measured, not guessed: a dated report in benchmarks/ backs each
# capability's row. The choice is a table and not a timing at start, so that all ranks and all runs agree.
AUTO_CPU = {"prefill": ("torch",), "decode": ("torch",)}
AUTO_CUDA = {"prefill": ("flash_attn", "triton", "torch"), "decode": ("flash_attn", "triton", "torch")}
AUTO_BY_CAPABILITY = {
    (9, 0): {"prefill": ("triton", "flash_attn", "torch"), "decode": ("triton", "flash_attn", "torch")},
}


def select_backends(
    spec: str,
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
) -> tuple[AttentionBackend, AttentionBackend]:
    """The backends for prefill and decode (one object when they are the same), and one log line that names them.

    `spec` is the user's `attention_backend`: "auto", a name, or two of these for prefill and decode, "name,name". Heads
    are those of this rank. Raises ValueError for an unknown name, and for a named backend that cannot run, with the
    reason; "auto" passes over such a one and the log line says why.
    """
    model = (device, dtype, num_heads, num_kv_heads, head_dim, block_size)
    reasons: dict[str, str | None] = {}  # of each backend considered, each asked once

    def unavailable_reason(name: str) -> str | None:
        if name not in reasons:
            reasons[name] = _load(name).unavailable_reason(*model)
        return reasons[name]

    chosen: list[str] = []
    for phase, name in zip(PHASES, _parse(spec), strict=True):
        candidates = _auto_order(device)[phase] if name == "auto" else (name,)
        # The first that can run; those behind it are not even imported, and their absence costs nobody anything.
        found = next((candidate for candidate in candidates if unavailable_reason(candidate) is None), None)
        if found is None:
            why = "; ".join(f"{candidate}: {reasons[candidate]}" for candidate in candidates)
            raise ValueError(f"attention_backend={spec!r} cannot run {phase} here ({why}). Use another one or 'auto'.")
        chosen.append(found)

    _log_choice(chosen, {name: reason for name, reason in reasons.items() if reason is not None})
    backends = {name: _load(name)() for name in chosen}
    return backends[chosen[0]], backends[chosen[1]]


def _parse(spec: str) -> tuple[str, str]:
    """The names for prefill and decode in `spec`, each known or "auto"."""
    names = [name.strip() for name in spec.split(",")]
    known = ["auto", *BACKENDS]
    if len(names) > 2 or any(name not in known for name in names):
        raise ValueError(
            f"attention_backend={spec!r} is not known: use one of {', '.join(known)}, "
            "or two of them for prefill and decode, such as 'flash_attn,triton'."
        )
    return names[0], names[-1]


def _auto_order(device: torch.device) -> dict[str, tuple[str, ...]]:
    if device.type != "cuda":
        return AUTO_CPU
    return AUTO_BY_CAPABILITY.get(torch.cuda.get_device_capability(device), AUTO_CUDA)


def _load(name: str) -> type[AttentionBackend]:
    module, cls = BACKENDS[name]
    return getattr(importlib.import_module(module), cls)


def _log_choice(chosen: list[str], passed_over: dict[str, str]) -> None:
    """One line; a warning when something that "auto" prefers could not be had, since it may cost speed."""
    line = "attention backend: " + ", ".join(f"{phase} {name}" for phase, name in zip(PHASES, chosen, strict=True))
    if passed_over:
        line += "; not " + "; not ".join(f"{name} ({reason})" for name, reason in passed_over.items())
    logger.log(logging.WARNING if passed_over else logging.INFO, line)
