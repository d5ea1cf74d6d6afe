"""Which model class runs which checkpoint: the `architectures` name of config.json to a class of this package.

`ModelConfig` checks a name here before anything else is read; the `ModelRunner` fetches the class. Modules are named
as strings and imported on use, so that the check costs nothing. A new model is a class, its line in `_MODELS` and its
defaults in `model_config.py`.
"""

from importlib import import_module

from torch import nn

_MODELS = {
    "Qwen3ForCausalLM": ("nanovllm.models.qwen3", "Qwen3ForCausalLM"),
}


def check_architecture(architecture: str | None) -> None:
    """Raise ValueError that lists the supported architectures unless this is one of them. None: config names none."""
    if architecture not in _MODELS:
        problem = "the config names no architecture" if architecture is None else f"{architecture!r} is not supported"
        raise ValueError(f"architectures: {problem}; supported: {', '.join(sorted(_MODELS))}")


def get_model_class(architecture: str) -> type[nn.Module]:
    """The class for this architecture, its module imported now. Raises ValueError for an unsupported one."""
    check_architecture(architecture)
    module, name = _MODELS[architecture]
    return getattr(import_module(module), name)
