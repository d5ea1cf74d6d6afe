"""nanovllm: offline inference for large language models.

`from nanovllm import LLM, SamplingParams` is the whole public surface. Both load on first use (PEP 562), so that
importing any part of the package, the scheduler in a test for example, does not pay for the engine.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

__all__ = ["LLM", "SamplingParams"]
__version__ = "0.1.0"

_EXPORTS = {"LLM": "nanovllm.llm", "SamplingParams": "nanovllm.sampling_params"}


def __getattr__(name: str) -> object:
    """Import an exported name the first time somebody asks for it."""
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value
