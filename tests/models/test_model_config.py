"""The normaliser of config.json, against transformers' own reading of the same files."""

import json
import pickle

import pytest

from nanovllm.models.model_config import ModelConfig

MINIMAL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 1000,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
}
# A folder as transformers 4.51 writes it, and the same model as 5.x writes it.
OLD_SPELLING = MINIMAL | {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": True,
    "max_position_embeddings": 40960,
    "use_sliding_window": False,
    "sliding_window": None,
    "eos_token_id": 7,
}
NEW_SPELLING = {k: v for k, v in OLD_SPELLING.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")} | {
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "dtype": "bfloat16",
    "layer_types": ["full_attention", "full_attention"],
}


def write(folder, raw, generation=None):
    (folder / "config.json").write_text(json.dumps(raw))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


def read(folder, raw, generation=None):
    return ModelConfig.from_pretrained(write(folder, raw, generation))


def transformers_fields(path):
    """What transformers reads from the folder, in our names."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    rope = getattr(config, "rope_parameters", None) or {}
    same = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
        "attention_bias",
    )
    fields = {name: getattr(config, name) for name in same}
    fields["rope_theta"] = rope["rope_theta"] if rope else config.rope_theta
    dtype = getattr(config, "dtype", None) or config.torch_dtype
    fields["dtype"] = dtype and str(dtype).removeprefix("torch.")
    return fields


@pytest.mark.parametrize(
    "raw",
    [
        MINIMAL,
        MINIMAL | {"num_key_value_heads": None},
        MINIMAL | {"rope_theta": 5000},
        MINIMAL | {"rope_scaling": {"rope_type": "default"}, "rope_theta": 5000},
        MINIMAL | {"rms_norm_eps": 1e-5, "attention_bias": True},
        OLD_SPELLING,
        OLD_SPELLING | {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16},
        OLD_SPELLING | {"torch_dtype": None},
    ],
)
def test_pitfall_68_every_field_is_what_transformers_reads(tmp_path, raw):
    ours = read(tmp_path, raw)
    for name, value in transformers_fields(str(tmp_path)).items():
        assert getattr(ours, name) == value, name


def test_pitfall_68_both_spellings_mean_the_same(tmp_path):
    old, new = read(tmp_path, OLD_SPELLING), read(tmp_path, NEW_SPELLING)
    assert old == new
    assert (old.rope_theta, old.dtype, old.eos_token_ids) == (1000000.0, "bfloat16", (7,))


def test_pitfall_68_a_folder_saved_by_the_installed_transformers_is_read_back(tmp_path):
    from transformers import Qwen3Config

    theta = {"rope_theta": 12345.0}
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"], vocab_size=99, num_attention_heads=6, num_key_value_heads=2, **theta
    )
    config.save_pretrained(tmp_path)
    ours = ModelConfig.from_pretrained(str(tmp_path))
    assert ours.rope_theta == 12345.0
    for name, value in transformers_fields(str(tmp_path)).items():
        assert getattr(ours, name) == value, name


def test_pitfall_68_rope_parameters_win_over_the_old_spelling(tmp_path):
    raw = OLD_SPELLING | {"rope_parameters": {"rope_theta": 777.0, "rope_type": "default"}}
    assert read(tmp_path, raw).rope_theta == 777.0


@pytest.mark.parametrize("head_dim", ["absent", None])
def test_pitfall_68_head_dim_absent_or_null_is_128(tmp_path, head_dim):
    raw = {k: v for k, v in OLD_SPELLING.items() if k != "head_dim"}
    if head_dim is None:
        raw["head_dim"] = None
    assert read(tmp_path, raw).head_dim == 128


@pytest.mark.parametrize("keys", [{}, {"torch_dtype": None}, {"dtype": None}])
def test_pitfall_68_config_without_dtype_says_none(tmp_path, keys):
    assert read(tmp_path, MINIMAL | keys).dtype is None


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "torch.float16"])
def test_dtype_is_read_from_either_key(tmp_path, key, name):
    assert read(tmp_path, MINIMAL | {key: name}).dtype == name.removeprefix("torch.")


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (None, None, ()),
        (7, None, (7,)),
        ([7, 9], None, (7, 9)),
        (7, {"eos_token_id": [5, 7]}, (5, 7)),
        ([7], {"eos_token_id": 5}, (5, 7)),
        (None, {"eos_token_id": [5, 6]}, (5, 6)),
        (0, {"eos_token_id": None}, (0,)),
        (7, {}, (7,)),
    ],
)
def test_eos_ids_are_the_union_of_both_files(tmp_path, in_config, in_generation, expected):
    assert read(tmp_path, MINIMAL | {"eos_token_id": in_config}, in_generation).eos_token_ids == expected


@pytest.mark.parametrize("value", ["</s>", -1, [1, None], 1.0, True])
def test_malformed_eos_id_is_refused_with_its_file(tmp_path, value):
    with pytest.raises(ValueError, match=r"[/\\]config.json: eos_token_id="):
        read(tmp_path, MINIMAL | {"eos_token_id": value})
    with pytest.raises(ValueError, match=r"[/\\]generation_config.json: eos_token_id="):
        read(tmp_path, MINIMAL, {"eos_token_id": value})


UNSUPPORTED_TYPES = ["linear", "dynamic", "yarn", "longrope", "llama3"]


@pytest.mark.parametrize("rope_type", UNSUPPORTED_TYPES)
@pytest.mark.parametrize(
    ("key", "type_key"), [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")]
)
def test_unsupported_rope_type_is_refused_by_name(tmp_path, key, type_key, rope_type):
    with pytest.raises(ValueError, match=rf"config.json: {key}: RoPE type '{rope_type}' is not supported"):
        read(tmp_path, MINIMAL | {key: {type_key: rope_type, "factor": 4.0}})


def test_unsupported_rope_scaling_is_refused_beside_plain_rope_parameters(tmp_path):
    raw = NEW_SPELLING | {"rope_scaling": {"type": "yarn", "factor": 4.0}}
    with pytest.raises(ValueError, match="'yarn'"):
        read(tmp_path, raw)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters per layer type"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor=0.25"),
        ({"rope_parameters": {"rope_theta": 0}}, "rope_theta=0 "),
        ({"rope_theta": "10000"}, "rope_theta='10000'"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window=true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config \(gptq\)"),
        ({"torch_dtype": "float64"}, "dtype='float64'"),
        ({"num_attention_heads": 6, "num_key_value_heads": 4}, "num_attention_heads=6 .*num_key_value_heads=4"),
        ({"num_attention_heads": 16}, "num_attention_heads=16 .*num_key_value_heads=32"),
        ({"head_dim": 63}, "head_dim=63 must be even"),
        ({"hidden_size": 0}, "hidden_size=0 must be a positive integer"),
        ({"vocab_size": 10.5}, "vocab_size=10.5"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps="),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=rf"config.json: .*{message}"):
        read(tmp_path, MINIMAL | change)


@pytest.mark.parametrize(
    "key", ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
)
def test_missing_field_is_named_with_the_file(tmp_path, key):
    for raw in ({k: v for k, v in MINIMAL.items() if k != key}, MINIMAL | {key: None}):
        with pytest.raises(ValueError, match=f"config.json: {key} is missing or null"):
            read(tmp_path, raw)


@pytest.mark.parametrize(
    ("architectures", "message"),
    [
        (["LlamaForCausalLM"], "'LlamaForCausalLM' is not supported; supported: .*Qwen3ForCausalLM"),
        (None, "names no architecture; supported: .*Qwen3ForCausalLM"),
        ([], "names no architecture"),
    ],
)
def test_pitfall_70_another_architecture_is_named_with_the_supported_ones(tmp_path, architectures, message):
    # A Llama 3 folder also has a RoPE type of its own: the architecture is the more useful thing to hear first.
    raw = MINIMAL | {"architectures": architectures, "rope_scaling": {"rope_type": "llama3"}}
    with pytest.raises(ValueError, match=rf"config.json: architectures: .*{message}"):
        read(tmp_path, raw)


def test_missing_config_names_the_path_and_the_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"config.json does not exist; .*Hugging Face layout") as caught:
        ModelConfig.from_pretrained(str(tmp_path))
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "version https://git-lfs.github.com/spec/v1", "[1, 2]", "null"])
def test_config_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config.json (is not valid JSON|must hold a JSON object).*again"):
        ModelConfig.from_pretrained(str(tmp_path))


def test_broken_generation_config_is_refused(tmp_path):
    write(tmp_path, MINIMAL)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^\S*generation_config.json is not valid JSON"):
        ModelConfig.from_pretrained(str(tmp_path))


def test_it_is_frozen_and_pickles_for_the_ranks(tmp_path):
    config = read(tmp_path, OLD_SPELLING)
    with pytest.raises(AttributeError):
        config.hidden_size = 1
    assert pickle.loads(pickle.dumps(config)) == config
