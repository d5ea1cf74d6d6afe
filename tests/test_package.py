"""What importing the package costs and exports. Each import runs in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

import nanovllm

REPOSITORY = Path(__file__).resolve().parents[1]
HEAVY = ("transformers", "triton", "flash_attn")


def modules_after(code: str) -> set[str]:
    """Top-level modules that a new interpreter holds after running `code`."""
    script = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "code", [pytest.param("import nanovllm", marks=pytest.mark.slow), "from nanovllm import LLM, SamplingParams"]
)
def test_import_loads_no_heavy_library(code):
    # torch itself may load one of them one day; then it is not ours to avoid.
    extra = modules_after(code) - modules_after("import torch")
    assert "nanovllm" in extra
    assert not extra.intersection(HEAVY)


def test_bare_import_does_not_even_load_torch():
    assert "torch" not in modules_after("import nanovllm")


def test_exports_are_the_classes_themselves():
    from nanovllm.llm import LLM
    from nanovllm.sampling_params import SamplingParams

    assert nanovllm.LLM is LLM
    assert nanovllm.SamplingParams is SamplingParams
    assert sorted(nanovllm.__all__) == ["LLM", "SamplingParams"]


def test_unknown_attribute_is_an_ordinary_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'LLMs'"):
        _ = nanovllm.LLMs
