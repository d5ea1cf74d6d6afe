"""Config: defaults, every refusal, unknown keywords, and how `model` becomes a directory."""

import json
import logging
import os
import pickle
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
import torch

from nanovllm.config import Config, config_from_kwargs
from nanovllm.utils.hub import resolve_model_path

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULTS = {
    "max_num_batched_tokens": 16384,
    "max_num_seqs": 512,
    "max_model_len": 4096,
    "gpu_memory_utilization": 0.9,
    "tensor_parallel_size": 1,
    "enforce_eager": False,
    "kvcache_block_size": 256,
    "num_kvcache_blocks": -1,
    "device": "auto",
    "dtype": "auto",
    "attention_backend": "auto",
    "load_format": "auto",
    "skip_tokenizer_init": False,
    "enable_prefix_caching": True,
    "overlap": True,
    "seed": None,
}


@pytest.fixture
def folder(tmp_path):
    """A model directory with nothing but a config.json, which is all that Config reads."""
    raw = {
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "eos_token_id": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    return str(tmp_path)


def test_defaults_are_the_documented_ones(folder):
    config = Config(folder)
    assert {f.name: getattr(config, f.name) for f in fields(Config)} == DEFAULTS | {
        "model": folder,
        "model_config": config.model_config,
    }
    assert config.model_config.eos_token_ids == (3,)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("max_num_seqs", -5),
        ("max_model_len", 1),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.01),
        ("gpu_memory_utilization", float("nan")),
        ("tensor_parallel_size", 0),
        ("tensor_parallel_size", 9),
        ("kvcache_block_size", 0),
        ("kvcache_block_size", 8),
        ("kvcache_block_size", 100),
        ("num_kvcache_blocks", 0),
        ("num_kvcache_blocks", -2),
        ("device", "gpu"),
        ("device", "cuda:"),
        ("device", "mps"),
        ("dtype", "float64"),
        ("dtype", torch.int8),
        ("dtype", "half"),
        ("attention_backend", ""),
        ("attention_backend", "triton,"),
        ("attention_backend", "a,b,c"),
        ("load_format", "pt"),
        ("seed", -1),
        ("seed", 2**63),
    ],
)
def test_value_that_cannot_work_is_refused_with_field_and_value(folder, field, value):
    with pytest.raises(ValueError, match=field) as caught:
        Config(folder, **{field: value})
    shown = "int8" if value is torch.int8 else str(value)
    assert f"{field}=" in str(caught.value)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_batched_tokens", 512.0),
        ("max_num_seqs", True),
        ("max_model_len", "4096"),
        ("max_model_len", None),
        ("gpu_memory_utilization", "0.9"),
        ("gpu_memory_utilization", True),
        ("tensor_parallel_size", 1.0),
        ("kvcache_block_size", None),
        ("num_kvcache_blocks", 10.5),
        ("enforce_eager", 1),
        ("skip_tokenizer_init", "yes"),
        ("enable_prefix_caching", None),
        ("overlap", 0),
        ("device", torch.device("cpu")),
        ("dtype", None),
        ("attention_backend", ("flash_attn", "triton")),
        ("load_format", None),
        ("seed", 1.5),
        ("seed", False),
    ],
)
def test_value_of_a_wrong_type_is_refused_with_field_and_value(folder, field, value):
    with pytest.raises(TypeError) as caught:
        Config(folder, **{field: value})
    assert f"{field}={value!r}" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_batched_tokens", 1),
        ("max_num_seqs", 1),
        ("max_model_len", 2),
        ("gpu_memory_utilization", 1),
        ("kvcache_block_size", 16),
        ("kvcache_block_size", 48),
        ("num_kvcache_blocks", 1),
        ("device", "cpu"),
        ("device", "cuda"),
        ("device", "cuda:1"),
        ("dtype", "float16"),
        ("attention_backend", "torch"),
        ("attention_backend", "flash_attn,triton"),
        ("load_format", "dummy"),
        ("seed", 0),
        ("seed", 2**63 - 1),
    ],
)
def test_value_at_the_edge_of_what_works_is_kept(folder, field, value):
    assert getattr(Config(folder, **{field: value}), field) == value


def test_a_step_may_be_smaller_than_a_sequence(folder):
    config = Config(folder, max_num_batched_tokens=256, max_model_len=4096)
    assert (config.max_num_batched_tokens, config.max_model_len) == (256, 4096)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_dtype_becomes_its_name(folder, dtype):
    assert f"torch.{Config(folder, dtype=dtype).dtype}" == str(dtype)


def test_numpy_numbers_become_plain_ones(folder):
    config = Config(folder, max_num_seqs=np.int64(3), gpu_memory_utilization=np.float32(0.5))
    assert type(config.max_num_seqs) is int
    assert type(config.gpu_memory_utilization) is float


def see_gpus(monkeypatch, number):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: number > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: number)


@pytest.mark.parametrize(("gpus", "device"), [(0, "auto"), (0, "cpu"), (1, "cpu")])
def test_two_ranks_on_a_cpu(folder, monkeypatch, gpus, device):
    see_gpus(monkeypatch, gpus)
    assert Config(folder, tensor_parallel_size=2, device=device).tensor_parallel_size == 2


@pytest.mark.parametrize(("gpus", "device"), [(2, "auto"), (4, "cuda")])
def test_two_ranks_on_as_many_gpus(folder, monkeypatch, gpus, device):
    see_gpus(monkeypatch, gpus)
    assert Config(folder, tensor_parallel_size=2, device=device).tensor_parallel_size == 2


@pytest.mark.parametrize(("gpus", "device"), [(1, "auto"), (0, "cuda"), (1, "cuda"), (3, "auto")])
def test_pitfall_46_more_ranks_than_gpus_are_refused(folder, monkeypatch, gpus, device):
    see_gpus(monkeypatch, gpus)
    with pytest.raises(ValueError, match=f"tensor_parallel_size=4 is more than the {gpus} visible GPUs"):
        Config(folder, tensor_parallel_size=4, device=device)


def test_one_gpu_by_number_cannot_hold_several_ranks(folder):
    with pytest.raises(ValueError, match="device='cuda:1' names one GPU and tensor_parallel_size=2 needs"):
        Config(folder, tensor_parallel_size=2, device="cuda:1")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_that_the_model_splits_over(folder, ranks):
    """4 heads and 2 KV heads: on 4 ranks each KV head is held twice; 100 tokens divide by 4, 99 would be padded."""
    assert Config(folder, tensor_parallel_size=ranks, device="cpu").tensor_parallel_size == ranks


@pytest.mark.parametrize(
    ("ranks", "changes", "numbers"),
    [
        (3, {}, "num_attention_heads=4 .* tensor_parallel_size=3"),
        (8, {}, "num_attention_heads=4 .* tensor_parallel_size=8"),
        (2, {"intermediate_size": 97}, "intermediate_size=97 .* tensor_parallel_size=2"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3}, "tensor_parallel_size=2 .* num_key_value_heads=3"),
    ],
)
def test_pitfall_49_ranks_that_the_model_does_not_split_over(folder, ranks, changes, numbers):
    file = Path(folder, "config.json")
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ValueError, match=numbers):
        Config(folder, tensor_parallel_size=ranks, device="cpu")


def test_max_model_len_is_lowered_to_what_the_model_can_and_logged(folder, caplog):
    with caplog.at_level(logging.INFO, logger="nanovllm"):
        assert Config(folder, max_model_len=8192).max_model_len == 8192
        assert not caplog.records
        assert Config(folder, max_model_len=8193).max_model_len == 8192
    assert "8193" in caplog.text
    assert "8192" in caplog.text


def test_pitfall_11_unknown_keyword_suggests_the_nearest_field(folder):
    with pytest.raises(TypeError, match="unknown keyword 'max_model_length'; did you mean 'max_model_len'"):
        config_from_kwargs(folder, {"max_model_length": 512})


@pytest.mark.parametrize(
    ("keyword", "field"),
    [
        ("gpu_memory_utilisation", "gpu_memory_utilization"),
        ("max_seqs", "max_num_seqs"),
        ("block_size", "kvcache_block_size"),
        ("tensor_parallel", "tensor_parallel_size"),
        ("Seed", "seed"),
    ],
)
def test_pitfall_11_other_near_misses(folder, keyword, field):
    with pytest.raises(TypeError, match=f"did you mean '{field}'"):
        config_from_kwargs(folder, {keyword: 1})


@pytest.mark.parametrize("keyword", ["trust_remote_code", "zzz"])
def test_pitfall_11_keyword_near_nothing_lists_the_fields(folder, keyword):
    with pytest.raises(TypeError, match=f"unknown keyword '{keyword}'; the fields are") as caught:
        config_from_kwargs(folder, {keyword: True})
    assert all(name in str(caught.value) for name in DEFAULTS)


def test_the_computed_field_is_no_keyword(folder):
    with pytest.raises(TypeError, match="unknown keyword 'model_config'"):
        config_from_kwargs(folder, {"model_config": None})


def test_unknown_keyword_is_reported_before_the_model_is_looked_for():
    with pytest.raises(TypeError, match="did you mean 'seed'"):
        config_from_kwargs("./nowhere", {"sed": 1})


def test_known_keywords_arrive(folder):
    config = config_from_kwargs(folder, {"max_num_seqs": 7, "seed": 5})
    assert (config.max_num_seqs, config.seed) == (7, 5)


def test_config_pickles_for_the_ranks(folder):
    config = Config(folder, max_num_seqs=3)
    assert pickle.loads(pickle.dumps(config)) == config


# How `model` becomes a directory (nanovllm/utils/hub.py).


@pytest.fixture
def no_download(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError(f"a download was tried: {args}")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)


def test_local_directory_becomes_absolute_without_download(folder, monkeypatch, no_download):
    parent, name = os.path.split(folder)
    monkeypatch.chdir(parent)
    monkeypatch.setenv("HOME", parent)
    for spelling in (folder, Path(folder), folder + "/", name, f"./{name}", f"~/{name}"):
        assert resolve_model_path(spelling) == folder
    assert Config(Path(folder)).model == folder


@pytest.mark.parametrize(
    "model", ["./nowhere", "../nowhere/x", "/nowhere", "~/nowhere", "a/b/c", "org/na me", "org/", "", "org\\name"]
)
def test_missing_local_path_is_named_and_never_looked_up_on_the_hub(model, monkeypatch, tmp_path, no_download):
    monkeypatch.chdir(tmp_path / "..")
    with pytest.raises(ValueError) as caught:
        resolve_model_path(model)
    assert f"model={model!r}" in str(caught.value)


def test_file_instead_of_directory_is_refused(folder, no_download):
    with pytest.raises(ValueError, match="is a file; give the directory"):
        resolve_model_path(os.path.join(folder, "config.json"))


@pytest.mark.parametrize("model", [None, 3, ["a"]])
def test_model_that_is_no_path_is_a_type_error(model):
    with pytest.raises(TypeError, match="model="):
        Config(model)


def test_hub_id_downloads_only_what_is_read(folder, monkeypatch):
    calls = []

    def download(repo_id, **kwargs):
        calls.append((repo_id, kwargs))
        return folder

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert Config("some-org/some.model-1").model == folder
    (repo_id, kwargs), = calls  # fmt: skip
    assert repo_id == "some-org/some.model-1"
    offered = [
        "config.json",
        "model-00001-of-00002.safetensors",
        "merges.txt",
        "tokenizer.model",
        "chat_template.jinja",
        "pytorch_model.bin",
        "README.md",
        "original/consolidated.safetensors",
        "onnx/config.json",
    ]
    assert list(huggingface_hub.utils.filter_repo_objects(offered, **kwargs)) == offered[:5]


def test_failed_download_names_the_id_and_the_remedies(monkeypatch):
    cause = ConnectionError("no route to host")

    def fail(*args, **kwargs):
        raise cause

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(
        OSError, match="'some-org/some-model'.*no route to host.*Check the name and the network"
    ) as caught:
        resolve_model_path("some-org/some-model")
    assert "local directory" in str(caught.value)
    assert caught.value.__cause__ is cause


def test_offline_download_says_so_without_touching_the_network(tmp_path):
    script = "from nanovllm.config import Config; Config('some-org/some-model')"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1
    assert "OSError: model='some-org/some-model' is no local directory" in done.stderr
    assert "unset HF_HUB_OFFLINE" in done.stderr
