"""Test set-up shared by all: Triton's interpreter where there is no GPU, tiny random checkpoints, the bundled model."""

import os

import torch

# Triton reads this when a kernel is decorated, so it has to stand before anything imports one.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    # Interpreted kernels and small matrices gain nothing from threads, and lose a lot to those of other processes.
    torch.set_num_threads(1)

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests skip, with the reason, where there is no GPU."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def bundled_model() -> str:
    """Directory of the trained model that comes with the project."""
    return str(ROOT / "assets" / "tiny-qwen3")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """Makes tiny random Qwen3 checkpoints with transformers: `tiny_model(seed=0, **config)` -> directory.

    The same arguments give the same directory. Weights are wide enough (std 0.2) that logits differ clearly. They are
    drawn here, so that they depend on no version of torch or transformers, and norm weights and biases are random
    too: the ones and zeros of a fresh model would hide that nobody applies them.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    made: dict[str, str] = {}

    def make(seed: int = 0, std: float = 0.2, max_shard_size: str = "5GB", **overrides: object) -> str:
        key = repr((seed, std, max_shard_size, sorted(overrides.items())))
        if key not in made:
            settings: dict[str, object] = {
                "vocab_size": 512,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 32,
                "max_position_embeddings": 4096,
                "rope_theta": 10000.0,
                "tie_word_embeddings": False,
                "eos_token_id": None,
                "bos_token_id": None,
                "pad_token_id": None,
            }
            model = Qwen3ForCausalLM(Qwen3Config(**(settings | overrides))).eval()
            rng = np.random.default_rng(seed)
            for name, param in sorted(model.named_parameters()):
                noise = torch.from_numpy(rng.standard_normal(param.shape, dtype=np.float32)) * std
                param.data.copy_(1 + noise if name.endswith("norm.weight") else noise)
            path = tmp_path_factory.mktemp("model")
            model.save_pretrained(path, max_shard_size=max_shard_size)
            made[key] = str(path)
        return made[key]

    return make
