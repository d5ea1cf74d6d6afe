"""Fills a model's parameters: strictly and tensor by tensor from safetensors files, or with random numbers.

The `ModelRunner` calls it once per rank. A checkpoint name leads to a parameter and, where several checkpoint tensors
make up one parameter (q, k and v, for example), to a shard id. The layers say how a tensor is cut: every parameter
carries a `weight_loader(param, source, *shard_id)` that copies its own part out of a sliceable `source`, a
memory-mapped safetensors slice here. Nothing is read until it is sliced, so the memory in use on top of the parameters
is at most the tensor being copied.
"""

import glob
import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

# safetensors' names of the dtypes we run in.
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_DUMMY_EMBEDDING_STD = 0.04
_COMPARED_ROWS = 4096


def source_shape(source: Any) -> tuple[int, ...]:
    """Shape of what a `weight_loader` gets: a tensor or a safetensors slice."""
    return tuple(source.shape) if isinstance(source, torch.Tensor) else tuple(source.get_shape())


def default_weight_loader(param: nn.Parameter, source: Any) -> None:
    """Copy a whole tensor, converted to the parameter's dtype. Raises ValueError if the shapes differ."""
    if source_shape(source) != tuple(param.shape):
        raise ValueError(f"the checkpoint has shape {source_shape(source)}, the model needs {tuple(param.shape)}")
    param.data.copy_(source[:])


@torch.no_grad()
def load_model(model: nn.Module, path: str) -> None:
    """Fill every parameter of `model` exactly once from the safetensors files in `path`.

    Raises ValueError that names the tensors or the file: a parameter without its tensor, a tensor without a parameter,
    the same tensor in two files, other shapes, weights in another format, a file that is missing or damaged. All but
    wrong shapes is found in the files' headers, before anything is copied.
    """
    expected = _expected_tensors(model)
    tied = _tied_names(model)
    files = _weight_files(path)
    found = {file: _tensor_names(file) for file in files}
    _check_names(path, expected, tied, found)

    for file, names in found.items():
        with _open(file) as handle:
            for name in names:
                if name not in expected:
                    continue  # a tied copy or a RoPE buffer: `_check_names` lets nothing else pass
                param, shard_id = expected[name]
                loader = getattr(param, "weight_loader", default_weight_loader)
                try:
                    loader(param, handle.get_slice(name), *shard_id)
                except (ValueError, IndexError, RuntimeError) as error:
                    raise ValueError(f"{file}: tensor {name!r} does not fit the model: {error}") from error


@torch.no_grad()
def load_dummy(model: nn.Module, seed: int = 0, rank: int = 0) -> None:
    """Random weights in place, the same for the same seed, rank and device: activations and logits keep a sane scale.

    Drawn for this rank's shards alone: another number of ranks has another model. Matrices get a standard deviation of
    1/sqrt(inputs). Embedding and head get 0.04: a normalised hidden state of 1024 then gives logits with a standard
    deviation of 1.28, so that sampling has something to choose from.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, param in model.named_parameters():
        if param.device not in generators:
            generators[param.device] = torch.Generator(param.device).manual_seed(seed + (rank << 40))
        generator = generators[param.device]
        parts = name.split(".")
        if parts[-1] == "bias":
            param.zero_()
        elif param.dim() == 1:  # the weights of norms
            param.fill_(1)
        elif "embed_tokens" in parts or "lm_head" in parts:
            param.normal_(0, _DUMMY_EMBEDDING_STD, generator=generator)
        else:
            num_inputs = getattr(param, "num_inputs", param.shape[-1])
            param.normal_(0, 1 / math.sqrt(num_inputs), generator=generator)


def checkpoint_dtype(path: str) -> str | None:
    """Dtype of the first floating tensor in `path`'s safetensors files, from a header; None without such a tensor."""
    for file in sorted(glob.glob(os.path.join(path, "*.safetensors"))):
        with _open(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (the handle is no mapping)
                code = handle.get_slice(name).get_dtype()
                if code in _DTYPES:
                    return _DTYPES[code]
    return None


def _expected_tensors(model: nn.Module) -> dict[str, tuple[nn.Parameter, tuple]]:
    """Checkpoint name -> (parameter, shard id), for all that a complete checkpoint holds.

    `...self_attn.qkv_proj.weight` becomes three entries, `...q_proj.weight` with ("q",) and so on, so that "every
    parameter exactly once" is a comparison of two sets of names. Names are compared component by component: "q_proj"
    is no part of "seq_proj".
    """
    sources: dict[str, list[tuple[str, object]]] = {}  # packed name -> [(checkpoint name, shard id)]
    for source, (packed, shard_id) in getattr(model, "packed_modules_mapping", {}).items():
        sources.setdefault(packed, []).append((source, shard_id))

    expected: dict[str, tuple[nn.Parameter, tuple]] = {}
    for name, param in model.named_parameters():
        parts = name.split(".")
        position = next((i for i, part in enumerate(parts) if part in sources), None)
        if position is None:
            expected[name] = (param, ())
            continue
        for source, shard_id in sources[parts[position]]:
            parts[position] = source
            expected[".".join(parts)] = (param, (shard_id,))
    return expected


def _tied_names(model: nn.Module) -> dict[str, str]:
    """Second name -> first name of each parameter that two modules share (lm_head -> embed_tokens)."""
    first = {id(param): name for name, param in model.named_parameters()}
    every = model.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in every if name != first[id(param)]}


def _weight_files(path: str) -> list[str]:
    """The safetensors files to read, picked as transformers does: the single file, else what the index lists."""
    single = os.path.join(path, "model.safetensors")
    index = single + ".index.json"
    if os.path.exists(single):
        return [single]
    if os.path.exists(index):
        try:
            with open(index, encoding="utf-8") as stream:
                names = sorted(set(json.load(stream)["weight_map"].values()))
            if not all(isinstance(name, str) and name for name in names):
                raise ValueError("a file name is no text")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is not an index of safetensors files ({error!r}); download it again") from error
        missing = [name for name in names if not os.path.exists(os.path.join(path, name))]
        if missing:
            raise ValueError(f"{path}: {_listed(missing)} named in the index but not there; download the model again")
        return [os.path.join(path, name) for name in names]
    files = sorted(glob.glob(os.path.join(path, "*.safetensors")))
    if files:
        return files
    others = sorted(name for name in os.listdir(path) if name.endswith((".bin", ".pt", ".pth")))
    if others:
        raise ValueError(
            f"{path} holds its weights as {_listed(others)}; only safetensors files are read (they run no code): "
            "convert it, for example with transformers' from_pretrained() and save_pretrained()"
        )
    raise ValueError(f"{path} holds no *.safetensors file; give the directory of a complete checkpoint")


def _open(file: str) -> Any:
    """Map a safetensors file into memory and check its header against its size."""
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(
            f"{file} is damaged or no safetensors file ({error}); download it again (a file of about 130 bytes is a "
            "Git LFS pointer, not the weights)"
        ) from error


def _tensor_names(file: str) -> list[str]:
    """The tensors of a file, each of a floating dtype: integers would be a quantisation that nobody undoes."""
    with _open(file) as handle:
        names = list(handle.keys())
        others = {name: handle.get_slice(name).get_dtype() for name in names}
    others = {name: dtype for name, dtype in others.items() if dtype not in (*_DTYPES, "F64")}
    if others:
        raise ValueError(
            f"{file}: {_listed(sorted(others))} stored as {', '.join(sorted(set(others.values())))}; only "
            "floating-point weights are read: use an unquantized checkpoint"
        )
    return names


def _check_names(path: str, expected: Iterable[str], tied: dict[str, str], found: dict[str, list[str]]) -> None:
    """Compare the names that the model needs with those in the files (file -> names), before anything is copied."""
    expected = set(expected)
    counts = Counter(name for names in found.values() for name in names)
    # RoPE tables are computed; old checkpoints still carry their frequencies.
    buffers = {name for name in counts if name.endswith("rotary_emb.inv_freq")}
    missing = sorted(expected - counts.keys())
    unknown = sorted(counts.keys() - expected - tied.keys() - buffers)
    repeated = sorted(name for name, count in counts.items() if count > 1)
    problems = [f"{_listed(missing)} missing"] if missing else []
    problems += [f"{_listed(unknown)} unknown to the model"] if unknown else []
    problems += [f"{_listed(repeated)} in more than one file"] if repeated else []
    if problems:
        raise ValueError(f"{path} does not match the model its config.json describes: {'; '.join(problems)}")

    where = {name: file for file, names in found.items() for name in names}
    for copy, original in tied.items():
        if copy in where and not _equal(where[copy], copy, where[original], original):
            raise ValueError(
                f"{where[copy]}: {copy!r} differs from {original!r}, but tie_word_embeddings=true makes them one; "
                "correct config.json (transformers' versions disagree on which of the two would count)"
            )


def _equal(file_a: str, name_a: str, file_b: str, name_b: str) -> bool:
    """Whether two stored tensors are the same, compared a few rows at a time."""
    with _open(file_a) as handle_a, _open(file_b) as handle_b:
        a, b = handle_a.get_slice(name_a), handle_b.get_slice(name_b)
        if source_shape(a) != source_shape(b) or not source_shape(a):
            return False
        rows = source_shape(a)[0]
        return all(
            torch.equal(a[i : i + _COMPARED_ROWS], b[i : i + _COMPARED_ROWS]) for i in range(0, rows, _COMPARED_ROWS)
        )


def _listed(names: list[str], limit: int = 5) -> str:
    """ "'a', 'b' and 3 more": enough to recognise the cause without printing thousands of names."""
    text = ", ".join(repr(name) for name in names[:limit])
    return text + (f" and {len(names) - limit} more" if len(names) > limit else "")
