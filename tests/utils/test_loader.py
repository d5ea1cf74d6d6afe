"""The strict streaming loader, on small modules whose parameters carry weight loaders as the layers' do."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from nanovllm.utils.loader import checkpoint_dtype, default_weight_loader, load_dummy, load_model, source_shape

REPOSITORY = Path(__file__).resolve().parents[2]
H, Q, KV, VOCAB = 8, 8, 4, 11


def rows_loader(offsets):
    """A loader that copies a source into the rows of its shard, as a packed layer does."""

    def load(param, source, shard_id):
        start, size = offsets[shard_id]
        if source_shape(source) != (size, *param.shape[1:]):
            raise ValueError(f"the checkpoint has {source_shape(source)}, the model {(size, *param.shape[1:])}")
        param.data[start : start + size].copy_(source[:])

    return load


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(Q + 2 * KV, H))
        self.weight.weight_loader = rows_loader({"q": (0, Q), "k": (Q, KV), "v": (Q + KV, KV)})


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv_proj = Packed()
        self.seq_proj = nn.Linear(H, H)  # "q_proj" is a substring of its name, and no part of it
        self.norm = nn.LayerNorm(H, bias=False)


class Model(nn.Module):
    packed_modules_mapping = {"q_proj": ("qkv_proj", "q"), "k_proj": ("qkv_proj", "k"), "v_proj": ("qkv_proj", "v")}

    def __init__(self, tied=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB, H)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.lm_head = nn.Linear(H, VOCAB, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight


def make_tensors(tied=False):
    """A complete checkpoint of `Model`, every value distinct."""
    shapes = {"embed_tokens.weight": (VOCAB, H)}
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, H)
    for i in range(2):
        shapes |= {f"layers.{i}.{name}_proj.weight": (size, H) for name, size in (("q", Q), ("k", KV), ("v", KV))}
        shapes |= {f"layers.{i}.seq_proj.weight": (H, H), f"layers.{i}.seq_proj.bias": (H,)}
        shapes |= {f"layers.{i}.norm.weight": (H,)}
    start, tensors = 0, {}
    for name, shape in shapes.items():
        size = torch.Size(shape).numel()
        tensors[name] = torch.arange(start, start + size, dtype=torch.float32).reshape(shape)
        start += size
    return tensors


def save_sharded(folder, tensors, num_shards):
    """Files as transformers writes them, with an index. Returns the files' names."""
    names = [f"model-{i + 1:05}-of-{num_shards:05}.safetensors" for i in range(num_shards)]
    weight_map = {tensor: names[i % num_shards] for i, tensor in enumerate(tensors)}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor, file in weight_map.items() if file == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return names


def assert_filled(model, tensors):
    assert torch.equal(model.embed_tokens.weight, tensors["embed_tokens.weight"])
    assert torch.equal(model.lm_head.weight, tensors.get("lm_head.weight", tensors["embed_tokens.weight"]))
    for i, layer in enumerate(model.layers):
        packed = torch.cat([tensors[f"layers.{i}.{name}_proj.weight"] for name in "qkv"])
        assert torch.equal(layer.qkv_proj.weight, packed)
        for name, param in list(layer.seq_proj.named_parameters(prefix="seq_proj")) + [
            ("norm.weight", layer.norm.weight)
        ]:
            assert torch.equal(param, tensors[f"layers.{i}.{name}"])


def assert_unchanged(model, before):
    assert all(torch.equal(param, before[name]) for name, param in model.state_dict().items())


def test_one_file_fills_every_parameter(tmp_path):
    tensors = make_tensors()
    save_file(tensors, tmp_path / "model.safetensors")
    model = Model()
    load_model(model, str(tmp_path))
    assert_filled(model, tensors)
    assert all(param.requires_grad and param.grad_fn is None for param in model.parameters())


@pytest.mark.parametrize("with_index", [True, False])
def test_sharded_files_fill_every_parameter(tmp_path, with_index):
    tensors = make_tensors()
    save_sharded(tmp_path, tensors, 3)
    if not with_index:
        (tmp_path / "model.safetensors.index.json").unlink()
    model = Model()
    load_model(model, str(tmp_path))
    assert_filled(model, tensors)


def test_files_that_the_index_does_not_list_are_left_alone(tmp_path):
    tensors = make_tensors()
    save_sharded(tmp_path, tensors, 2)
    save_file(tensors, tmp_path / "consolidated.safetensors")
    model = Model()
    load_model(model, str(tmp_path))
    assert_filled(model, tensors)


def test_values_are_converted_to_the_parameters_dtype(tmp_path):
    tensors = make_tensors()
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    model = Model()
    load_model(model, str(tmp_path))
    assert model.lm_head.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, tensors["lm_head.weight"].bfloat16().float())


def test_pitfall_69_removed_tensor_is_named_before_anything_is_copied(tmp_path):
    for name in make_tensors():
        tensors = make_tensors()
        del tensors[name]
        save_file(tensors, tmp_path / "model.safetensors")
        model = Model()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=f"'{name}' missing") as caught:
            load_model(model, str(tmp_path))
        assert str(tmp_path) in str(caught.value)
        assert_unchanged(model, before)


@pytest.mark.parametrize(
    "name", ["layers.2.norm.weight", "layers.0.norm.bias", "x.q_proj.weight", "layers.0.qkv_proj.weight", "extra"]
)
def test_pitfall_69_unknown_tensor_is_named_before_anything_is_copied(tmp_path, name):
    save_file(make_tensors() | {name: torch.zeros(H)}, tmp_path / "model.safetensors")
    model = Model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"'{name}' unknown to the model"):
        load_model(model, str(tmp_path))
    assert_unchanged(model, before)


def test_pitfall_69_missing_shard_is_named(tmp_path):
    names = save_sharded(tmp_path, make_tensors(), 3)
    (tmp_path / names[1]).unlink()
    with pytest.raises(ValueError, match=f"'{names[1]}' named in the index but not there"):
        load_model(Model(), str(tmp_path))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pitfall_69_folder_with_only_pickled_weights_says_to_convert_them(tmp_path, name):
    torch.save(make_tensors(), tmp_path / name)
    with pytest.raises(ValueError, match=f"'{name}'; only safetensors files are read.*convert") as caught:
        load_model(Model(), str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_pitfall_69_empty_folder_is_named(tmp_path):
    with pytest.raises(ValueError, match="holds no .*safetensors file") as caught:
        load_model(Model(), str(tmp_path))
    assert str(tmp_path) in str(caught.value)


def test_pitfall_69_many_missing_tensors_are_counted_not_listed(tmp_path):
    save_file({"embed_tokens.weight": torch.zeros(VOCAB, H)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_model(Model(), str(tmp_path))
    num_missing = len(make_tensors()) - 1
    assert f"and {num_missing - 5} more missing" in str(caught.value)
    assert str(caught.value).count("layers.") == 5


@pytest.mark.parametrize("damage", ["truncated", "pointer", "empty"])
@pytest.mark.parametrize("sharded", [False, True])
def test_damaged_file_is_named(tmp_path, damage, sharded):
    names = save_sharded(tmp_path, make_tensors(), 2) if sharded else ["model.safetensors"]
    if not sharded:
        save_file(make_tensors(), tmp_path / names[0])
    victim = tmp_path / names[-1]
    content = {
        "truncated": victim.read_bytes()[:-4],
        "pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 100\n",
        "empty": b"",
    }[damage]
    victim.write_bytes(content)
    model = Model()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=f"{names[-1]} is damaged or no safetensors file.*download it again"):
        load_model(model, str(tmp_path))
    assert_unchanged(model, before)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index_is_named(tmp_path, text):
    save_sharded(tmp_path, make_tensors(), 2)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json is not an index"):
        load_model(Model(), str(tmp_path))


def test_tensor_in_two_files_is_named(tmp_path):
    tensors = make_tensors()
    names = save_sharded(tmp_path, tensors, 2)
    twice = "layers.1.k_proj.weight"
    for name in names:
        content = {key: value for i, (key, value) in enumerate(tensors.items()) if names[i % 2] == name}
        save_file(content | {twice: tensors[twice]}, tmp_path / name)
    with pytest.raises(ValueError, match=f"'{twice}' in more than one file"):
        load_model(Model(), str(tmp_path))


@pytest.mark.parametrize(
    ("name", "needed"),
    [("lm_head.weight", (VOCAB, H)), ("layers.1.k_proj.weight", (KV, H)), ("layers.0.norm.weight", (H,))],
)
def test_other_shape_is_named_with_both_shapes_and_the_file(tmp_path, name, needed):
    wrong = (needed[0] + 1, *needed[1:])
    save_file(make_tensors() | {name: torch.zeros(wrong)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=rf"model.safetensors: tensor '{name}' does not fit") as caught:
        load_model(Model(), str(tmp_path))
    assert str(wrong) in str(caught.value)
    assert str(needed) in str(caught.value)


def test_rope_frequencies_of_old_checkpoints_are_skipped(tmp_path):
    tensors = make_tensors()
    old = {"layers.0.rotary_emb.inv_freq": torch.zeros(4), "rotary_emb.inv_freq": torch.zeros(4)}
    save_file(tensors | old, tmp_path / "model.safetensors")
    model = Model()
    load_model(model, str(tmp_path))
    assert_filled(model, tensors)


@pytest.mark.parametrize("num_shards", [1, 2])
def test_tied_head_is_filled_once_whether_or_not_the_checkpoint_repeats_it(tmp_path, num_shards):
    tensors = make_tensors(tied=True)
    for extra in ({}, {"lm_head.weight": tensors["embed_tokens.weight"].clone()}):
        save_sharded(tmp_path, tensors | extra, num_shards)
        model = Model(tied=True)
        load_model(model, str(tmp_path))
        assert model.lm_head.weight is model.embed_tokens.weight
        assert_filled(model, tensors)


@pytest.mark.parametrize("change", ["last row", "shape"])
def test_tied_head_that_differs_from_the_embedding_is_refused(tmp_path, change):
    tensors = make_tensors(tied=True)
    head = tensors["embed_tokens.weight"].clone()
    if change == "shape":
        head = head[:-1].contiguous()
    else:
        head[-1, -1] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="'lm_head.weight' differs from 'embed_tokens.weight'.*tie_word_embeddings"):
        load_model(Model(tied=True), str(tmp_path))


def test_untied_model_needs_its_head(tmp_path):
    save_file(make_tensors(tied=True), tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'lm_head.weight' missing"):
        load_model(Model(), str(tmp_path))


def test_loader_gets_a_source_that_it_can_cut_itself(tmp_path):
    seen = []

    def half(param, source):
        seen.append(source_shape(source))
        param.data.copy_(source[4:6, 2:4])

    class Shard(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 2))
            self.weight.weight_loader = half

    whole = torch.arange(48.0).reshape(6, 8)
    save_file({"weight": whole}, tmp_path / "model.safetensors")
    model = Shard()
    load_model(model, str(tmp_path))
    assert seen == [(6, 8)]
    assert torch.equal(model.weight, whole[4:6, 2:4])


def test_default_loader_takes_a_tensor_and_checks_its_shape():
    param = nn.Parameter(torch.zeros(2, 3))
    default_weight_loader(param, torch.ones(2, 3))
    assert torch.equal(param, torch.ones(2, 3))
    for wrong in (torch.ones(3), torch.ones(1, 3), torch.ones(3, 2)):  # the first two would broadcast
        with pytest.raises(ValueError, match=r"\(2, 3\)"):
            default_weight_loader(param, wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_pitfall_68_dtype_comes_from_the_weights_when_the_config_has_none(tmp_path, dtype):
    assert checkpoint_dtype(str(tmp_path)) is None
    save_file({"a_position": torch.zeros(2, dtype=torch.int64)}, tmp_path / "a.safetensors")
    assert checkpoint_dtype(str(tmp_path)) is None
    save_file({"weight": torch.zeros(2, dtype=dtype)}, tmp_path / "model.safetensors")
    assert f"torch.{checkpoint_dtype(str(tmp_path))}" == str(dtype)


class Dummy(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.embed_tokens = nn.Embedding(3000, 1024, dtype=dtype)
        self.up_proj = nn.Linear(1024, 500, dtype=dtype)
        self.norm = nn.LayerNorm(1024, bias=False, dtype=dtype)
        self.lm_head = nn.Linear(1024, 3000, bias=False, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dummy_weights_keep_activations_and_logits_in_scale(dtype):
    model = Dummy(dtype)
    load_dummy(model)
    with torch.no_grad():
        hidden = torch.randn(20, 1024, generator=torch.Generator().manual_seed(1)).to(dtype)
        logits, projected = model.lm_head(hidden).float(), model.up_proj(hidden).float()
    assert 1.2 < logits.std() < 1.4
    assert 0.95 < projected.std() < 1.05
    assert 0.035 < model.embed_tokens.weight.float().std() < 0.045
    assert torch.equal(model.norm.weight, torch.ones(1024, dtype=dtype))
    assert not model.up_proj.bias.any()
    assert not torch.equal(model.embed_tokens.weight, model.lm_head.weight)


def test_dummy_weights_are_the_same_for_the_same_seed():
    def weights(seed):
        model = Model()
        load_dummy(model, seed=seed)
        return model.state_dict()

    first, again, other = weights(3), weights(3), weights(4)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


# Runs in a process of its own. Fills models whose parameters are in memory already and prints how far anonymous memory
# rose above that: streamed, streamed with a change of dtype, and read whole, as a control of the measurement itself.
MEMORY_SCRIPT = """
import sys, threading
import torch
from safetensors.torch import load
from torch import nn
from nanovllm.utils.loader import load_model

path = sys.argv[1]

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon"))

def load_whole(model, path):
    with open(path + "/model.safetensors", "rb") as file:
        model.load_state_dict(load(file.read()))

def extra(load, dtype):
    model = nn.ModuleDict({f"l{i}": nn.Linear(2048, 2048, bias=False, dtype=dtype) for i in range(10)})
    done, samples = threading.Event(), [anonymous()]
    def watch():
        while not done.wait(0.0002):
            samples.append(anonymous())
    watcher = threading.Thread(target=watch)
    watcher.start()
    load(model, path)
    samples.append(anonymous())
    done.set()
    watcher.join()
    assert all(float(model[f"l{i}"].weight[-1, -1]) == i for i in range(10))
    return max(samples) - samples[0]

torch.set_num_threads(1)
print(extra(load_model, torch.float32), extra(load_model, torch.bfloat16), extra(load_whole, torch.float32))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads RssAnon, which Linux has")
def test_loading_needs_no_more_memory_than_the_largest_tensor(tmp_path):
    tensors = {f"l{i}.weight": torch.full((2048, 2048), float(i)) for i in range(10)}
    save_file(tensors, tmp_path / "model.safetensors")
    largest = tensors["l0.weight"].nbytes
    command = [sys.executable, "-c", MEMORY_SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    streamed, converted, whole = map(int, done.stdout.split())
    assert streamed <= 1.3 * largest
    assert converted <= 1.3 * largest
    assert whole >= 9 * largest  # the measurement does see a loader that does not stream
