"""Engine configuration: every keyword of `LLM(model, **kwargs)`, checked once, before any weight is read.

`LLMEngine` builds the one `Config` of an engine with `config_from_kwargs` and hands it to every rank. Nobody changes
it afterwards: what is found at run time (the real number of cache blocks, the tokenizer's EOS ids) lives on the engine.
"""

import difflib
import logging
import numbers
import os
import re
from dataclasses import dataclass, field, fields

import torch

from nanovllm.models.model_config import SUPPORTED_DTYPES, ModelConfig
from nanovllm.utils.dist import divide
from nanovllm.utils.hub import resolve_model_path

logger = logging.getLogger("nanovllm")

# Integer fields: smallest and largest value. A prompt needs room for itself and one token, hence 2.
_INT32 = 2**31 - 1  # positions, slots and block ids are int32 on the device
_INT_RANGES: dict[str, tuple[int, int]] = {
    "max_num_batched_tokens": (1, _INT32),
    "max_num_seqs": (1, 1 << 20),
    "max_model_len": (2, _INT32),
    "tensor_parallel_size": (1, 8),
    "kvcache_block_size": (16, 1 << 20),
    "num_kvcache_blocks": (-1, _INT32),
    "seed": (0, 2**63 - 1),
}
_BOOLS = ("enforce_eager", "skip_tokenizer_init", "enable_prefix_caching", "overlap")


@dataclass(slots=True)
class Config:
    """Checked settings of one engine. Raises TypeError for a wrong type, ValueError for a value that cannot work."""

    # Directory in Hugging Face layout, or a hub id; after the checks the absolute path of the directory.
    model: str
    # Tokens computed in one step at most. A prompt longer than that is computed in chunks over several steps.
    max_num_batched_tokens: int = 16384
    # Sequences running at a time at most.
    max_num_seqs: int = 512
    # Prompt plus completion of one sequence, in tokens; lowered to the model's max_position_embeddings.
    max_model_len: int = 4096
    # Share of the GPU's memory that weights, activations and KV cache may take together.
    gpu_memory_utilization: float = 0.9
    # Ranks that each hold a part of every weight.
    tensor_parallel_size: int = 1
    # True: decode without CUDA graphs.
    enforce_eager: bool = False
    # Tokens per KV cache block: a multiple of 16; the attention backend may ask for more (flash_attn: of 256).
    kvcache_block_size: int = 256
    # Blocks in the KV cache; -1: as many as memory allows.
    num_kvcache_blocks: int = -1
    # "auto" (CUDA if there is one), "cpu", "cuda" or "cuda:1".
    device: str = "auto"
    # "auto" (the checkpoint's; float32 on a CPU), or a name of SUPPORTED_DTYPES; a torch.dtype is taken too.
    dtype: str = "auto"
    # "auto", one backend's name, or two for prefill and decode: "flash_attn,triton".
    attention_backend: str = "auto"
    # "auto": the checkpoint's weights; "dummy": random weights on the shapes of config.json.
    load_format: str = "auto"
    # True: no tokenizer is loaded, prompts must be token ids and completions have no text.
    skip_tokenizer_init: bool = False
    # Share KV cache blocks between sequences with equal beginnings.
    enable_prefix_caching: bool = True
    # Launch the next step before this one's tokens have reached the host; the tokens are the same either way.
    overlap: bool = True
    # The same calls in the same order on a new engine draw the same tokens; None: other ones in every run.
    seed: int | None = None
    # The model's shapes and constants, read from config.json.
    model_config: ModelConfig = field(init=False)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_choices()
        self._check_ranks()
        self.model = resolve_model_path(self.model)
        self.model_config = ModelConfig.from_pretrained(self.model)
        self._check_split()
        limit = self.model_config.max_position_embeddings
        if self.max_model_len > limit:
            logger.info("max_model_len=%d lowered to the model's max_position_embeddings=%d", self.max_model_len, limit)
            self.max_model_len = limit

    def _check_numbers(self) -> None:
        for name, (low, high) in _INT_RANGES.items():
            value = getattr(self, name)
            if name == "seed" and value is None:
                continue
            # bool is a subclass of int; NumPy's integers are Integral and become plain ones.
            if isinstance(value, bool) or not isinstance(value, numbers.Integral):
                raise TypeError(f"{name}={value!r} must be an integer")
            if not low <= value <= high:
                raise ValueError(f"{name}={value} must be between {low} and {high}")
            setattr(self, name, int(value))
        if self.kvcache_block_size % 16:
            raise ValueError(
                f"kvcache_block_size={self.kvcache_block_size} must be a multiple of 16; the default is 256"
            )
        if self.num_kvcache_blocks == 0:
            raise ValueError("num_kvcache_blocks=0 must be at least 1, or -1 for as many as memory allows")

        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, numbers.Real):
            raise TypeError(f"gpu_memory_utilization={share!r} must be a number above 0 and at most 1")
        if not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization={share} must be above 0 and at most 1; the default is 0.9")
        self.gpu_memory_utilization = float(share)

    def _check_choices(self) -> None:
        for name in _BOOLS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        if not isinstance(self.model, (str, os.PathLike)):
            raise TypeError(f"model={self.model!r} must be a directory or a hub id such as 'org/name'")
        if isinstance(self.dtype, torch.dtype):
            self.dtype = str(self.dtype).removeprefix("torch.")
        _check_match("device", self.device, r"auto|cpu|cuda(:\d+)?", "'auto', 'cpu', 'cuda' or 'cuda:N'")
        dtypes = ("auto", *SUPPORTED_DTYPES)
        _check_match("dtype", self.dtype, "|".join(dtypes), f"one of {', '.join(map(repr, dtypes))}")
        _check_match("load_format", self.load_format, "auto|dummy", "'auto' or 'dummy'")
        # Which names exist, and which work here, only the backends know: they answer before any weight is read.
        expected = "'auto', one backend's name, or two for prefill and decode, as in 'flash_attn,triton'"
        _check_match("attention_backend", self.attention_backend, r"\w+(,\s*\w+)?", expected)

    def _check_ranks(self) -> None:
        """Each rank has a GPU of its own, the first ones that are visible."""
        if self.tensor_parallel_size == 1:
            return
        if self.device.startswith("cuda:"):
            raise ValueError(
                f"device={self.device!r} names one GPU and tensor_parallel_size={self.tensor_parallel_size} needs as "
                "many; use device='cuda' and choose the GPUs with CUDA_VISIBLE_DEVICES"
            )
        num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        on_gpus = self.device == "cuda" or (self.device == "auto" and num_gpus > 0)
        if on_gpus and self.tensor_parallel_size > num_gpus:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} is more than the {num_gpus} visible GPUs; lower it, "
                "let CUDA_VISIBLE_DEVICES name more, or use device='cpu'"
            )

    def _check_split(self) -> None:
        """The vocabulary is padded and KV heads are held twice where needed; the rest has to divide by the ranks."""
        size, num_kv_heads = self.tensor_parallel_size, self.model_config.num_key_value_heads
        for name in ("num_attention_heads", "intermediate_size"):
            divide(f"the model's {name}", getattr(self.model_config, name), size)
        if num_kv_heads % size and size % num_kv_heads:
            raise ValueError(
                f"tensor_parallel_size={size} is neither a divisor nor a multiple of the model's num_key_value_heads="
                f"{num_kv_heads}; use one that is"
            )


def config_from_kwargs(model: str | None, kwargs: dict[str, object]) -> Config:
    """`Config(model, **kwargs)`, where an unknown keyword raises TypeError that names the nearest field."""
    if model is None:
        given = next((name for name in kwargs if "model" in name and name != "max_model_len"), None)
        instead = f", not {given}=" if given else ""
        raise TypeError(f"LLM() needs a model: LLM('path/to/a/directory'), LLM('org/name') or LLM(model=...){instead}")
    known = [f.name for f in fields(Config) if f.init and f.name != "model"]
    for name in kwargs:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"the fields are {', '.join(known)}"
            raise TypeError(f"LLM() got an unknown keyword {name!r}; {hint}")
    return Config(model, **kwargs)


def _check_match(name: str, value: object, pattern: str, expected: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string: {expected}")
    if not re.fullmatch(pattern, value):
        raise ValueError(f"{name}={value!r} must be {expected}")
