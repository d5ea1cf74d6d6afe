"""The shapes and constants of a model, normalised from a checkpoint's config.json.

`Config` reads it once and every rank gets it; model code reads nothing else. The JSON is read directly, so that ranks
need no transformers and both of its spellings mean the same: `torch_dtype`, `rope_theta` and `rope_scaling` up to
4.x; `dtype` and `rope_parameters` since 5.0. Whatever would change the result and is not implemented is refused here
by name.
"""

import json
import os
from dataclasses import dataclass
from typing import Any

from nanovllm.models.registry import check_architecture

SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

# What a key means when config.json leaves it out: the defaults of transformers' Qwen3Config.
_QWEN3_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": 32,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
}


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What a model class needs to know about its checkpoint. Sizes are whole-model, not per rank."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str | None  # as config.json says; None: it says nothing, the weights' own dtype counts
    eos_token_ids: tuple[int, ...]  # generation_config.json's, then config.json's

    @classmethod
    def from_pretrained(cls, path: str) -> "ModelConfig":
        """Read `path`/config.json (and generation_config.json's EOS ids, if there is one).

        Raises ValueError that names the file and the key for anything missing, malformed or unsupported.
        """
        file = os.path.join(path, "config.json")
        raw = _read_json(file)
        eos_token_ids = _generation_eos(path)
        try:
            return cls._from_dict(raw, eos_token_ids)
        except ValueError as error:
            raise ValueError(f"{file}: {error}") from None
        except (TypeError, KeyError, AttributeError, OverflowError) as error:
            # A value of a kind that no version of the format has; the reader's own words say where it broke.
            raise ValueError(f"{file}: a value has the wrong type ({error}); download or save it again") from error

    @classmethod
    def _from_dict(cls, raw: dict[str, Any], eos_token_ids: tuple[int, ...]) -> "ModelConfig":
        architectures = raw.get("architectures") or [None]
        if not isinstance(architectures, list) or not isinstance(architectures[0], (str, type(None))):
            raise ValueError(f"architectures={architectures!r} must be a list of class names")
        architecture = architectures[0]
        check_architecture(architecture)
        raw = _QWEN3_DEFAULTS | raw
        _refuse_unsupported(raw)

        num_heads = _positive_int(raw, "num_attention_heads")
        if raw["num_key_value_heads"] is None:
            raw["num_key_value_heads"] = num_heads
        if raw["head_dim"] is None:
            raw["head_dim"] = _QWEN3_DEFAULTS["head_dim"]
        num_kv_heads = _positive_int(raw, "num_key_value_heads")
        head_dim = _positive_int(raw, "head_dim")
        if num_heads % num_kv_heads:
            raise ValueError(f"num_attention_heads={num_heads} is no multiple of num_key_value_heads={num_kv_heads}")
        if head_dim % 2:
            raise ValueError(f"head_dim={head_dim} must be even: RoPE rotates the two halves of a head")

        return cls(
            architecture=architecture,
            vocab_size=_positive_int(raw, "vocab_size"),
            hidden_size=_positive_int(raw, "hidden_size"),
            intermediate_size=_positive_int(raw, "intermediate_size"),
            num_hidden_layers=_positive_int(raw, "num_hidden_layers"),
            num_attention_heads=num_heads,
            num_key_value_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_positive_float(raw, "rms_norm_eps"),
            rope_theta=_rope_theta(raw),
            max_position_embeddings=_positive_int(raw, "max_position_embeddings"),
            tie_word_embeddings=_bool(raw, "tie_word_embeddings"),
            attention_bias=_bool(raw, "attention_bias"),
            dtype=_dtype(raw),
            eos_token_ids=tuple(dict.fromkeys(eos_token_ids + _eos_token_ids(raw))),
        )


def _read_json(file: str) -> dict[str, Any]:
    try:
        with open(file, encoding="utf-8") as stream:
            raw = json.load(stream)
    except FileNotFoundError:
        raise ValueError(
            f"{file} does not exist; model must be a directory in Hugging Face layout: config.json, *.safetensors, "
            "tokenizer files"
        ) from None
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error}); download or save it again") from error
    except ValueError as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise ValueError(f"{file} is not valid JSON ({error}); download or save it again") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{file} must hold a JSON object, not a {type(raw).__name__}; download or save it again")
    return raw


def _refuse_unsupported(raw: dict[str, Any]) -> None:
    """Features that would change the result and do not exist here."""
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unnamed")
        raise ValueError(f"quantization_config ({method}) is not supported; use the unquantized checkpoint")
    if raw.get("use_sliding_window"):
        raise ValueError("use_sliding_window=true is not supported; use a checkpoint with full attention")
    other_layers = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if other_layers:
        raise ValueError(f"layer_types {other_layers} are not supported, only 'full_attention'")
    if raw["hidden_act"] != "silu":
        raise ValueError(f"hidden_act={raw['hidden_act']!r} is not supported, only 'silu'")


def _rope_theta(raw: dict[str, Any]) -> float:
    """The base of RoPE from either spelling; `rope_parameters` wins, as a file may hold both."""
    spellings = {key: raw.get(key) or {} for key in ("rope_scaling", "rope_parameters")}
    for key, rope in spellings.items():
        # Parameters per layer type are nested one level deeper; the models here have one kind of layer.
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError(f"{key} per layer type ({', '.join(rope)}) is not supported")
        rope_type = rope.get("rope_type") or rope.get("type") or "default"
        if rope_type != "default":
            raise ValueError(f"{key}: RoPE type {rope_type!r} is not supported, only 'default' (no scaling)")
    merged = raw | spellings["rope_scaling"] | spellings["rope_parameters"]
    factor = merged.get("partial_rotary_factor", 1)
    if factor != 1:
        raise ValueError(f"partial_rotary_factor={factor!r} is not supported, only 1 (RoPE on the whole head)")
    return _positive_float(merged, "rope_theta")


def _dtype(raw: dict[str, Any]) -> str | None:
    dtype = raw.get("dtype") or raw.get("torch_dtype")
    if dtype is None:
        return None
    name = str(dtype).removeprefix("torch.")
    if name not in SUPPORTED_DTYPES:
        raise ValueError(f"dtype={dtype!r} is not supported; convert the checkpoint to {', '.join(SUPPORTED_DTYPES)}")
    return name


def read_generation_config(path: str) -> dict[str, Any]:
    """What `path`/generation_config.json holds; nothing if there is none."""
    file = os.path.join(path, "generation_config.json")
    return _read_json(file) if os.path.exists(file) else {}


def _generation_eos(path: str) -> tuple[int, ...]:
    raw = read_generation_config(path)
    try:
        return _eos_token_ids(raw)
    except ValueError as error:
        raise ValueError(f"{path}/generation_config.json: {error}") from None


def _eos_token_ids(raw: dict[str, Any]) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token_id) is int and token_id >= 0 for token_id in ids):
        raise ValueError(f"eos_token_id={value!r} must be a token id, a list of token ids, or null")
    return tuple(ids)


def _present(raw: dict[str, Any], key: str) -> Any:
    if raw.get(key) is None:
        raise ValueError(f"{key} is missing or null")
    return raw[key]


def _positive_int(raw: dict[str, Any], key: str) -> int:
    value = _present(raw, key)
    if type(value) is not int or value < 1:
        raise ValueError(f"{key}={value!r} must be a positive integer")
    return value


def _positive_float(raw: dict[str, Any], key: str) -> float:
    value = _present(raw, key)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ValueError(f"{key}={value!r} must be a positive number")
    return float(value)


def _bool(raw: dict[str, Any], key: str) -> bool:
    value = _present(raw, key)
    if not isinstance(value, bool):
        raise ValueError(f"{key}={value!r} must be true or false")
    return value
