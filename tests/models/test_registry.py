"""Architecture name to model class."""

import subprocess
import sys
from pathlib import Path

import pytest

from nanovllm.models.registry import check_architecture, get_model_class

REPOSITORY = Path(__file__).resolve().parents[2]


def test_class_is_found_by_its_checkpoint_name():
    model_class = get_model_class("Qwen3ForCausalLM")
    assert model_class.__name__ == "Qwen3ForCausalLM"
    assert model_class.packed_modules_mapping["k_proj"] == ("qkv_proj", "k")


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "qwen3forcausallm", "Qwen3Model", ""])
def test_pitfall_70_unsupported_architecture_is_named_with_the_supported_ones(name):
    for function in (check_architecture, get_model_class):
        with pytest.raises(ValueError, match=f"'{name}' is not supported; supported: .*Qwen3ForCausalLM"):
            function(name)


def test_pitfall_70_missing_architecture_lists_the_supported_ones():
    with pytest.raises(ValueError, match="names no architecture; supported: .*Qwen3ForCausalLM"):
        check_architecture(None)


def test_checking_a_name_imports_no_model():
    script = (
        "import sys; from nanovllm.models.registry import check_architecture; check_architecture('Qwen3ForCausalLM');"
        "print('nanovllm.models.qwen3' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "False"
