"""The layers' tensor-parallel form, on gloo: ranks are threads of this process, each with its own group object."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed as dist

from nanovllm.layers.embed_head import ParallelLMHead, VocabParallelEmbedding
from nanovllm.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from nanovllm.models.model_config import ModelConfig
from nanovllm.models.qwen3 import Qwen3ForCausalLM
from nanovllm.utils import loader
from nanovllm.utils.dist import Group


def on_ranks(size: int, body: Callable[[Group], Any]) -> list[Any]:
    """Run `body(group)` on `size` ranks side by side; returns the results in rank order."""
    store = dist.HashStore()
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def rank_main(rank: int) -> None:
        try:
            group = Group(rank, size, dist.ProcessGroupGloo(store, rank, size)) if size > 1 else Group()
            with torch.inference_mode():
                results[rank] = body(group)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank_main, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors, errors
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def fill(layer: torch.nn.Module, name: str, source: torch.Tensor, *shard_id: Any) -> None:
    param = getattr(layer, name)
    param.weight_loader(param, source, *shard_id)


SIZES = [1, 2, 4]


@pytest.mark.parametrize("size", SIZES)
def test_column_then_row_is_the_whole_mlp(size: int) -> None:
    x, gate, up, down = random(5, 16), random(24, 16, seed=1), random(24, 16, seed=2), random(16, 24, seed=3)
    down_bias = random(16, seed=4)

    def body(group: Group) -> torch.Tensor:
        merged = MergedColumnParallelLinear(16, [24, 24], group=group)
        row = RowParallelLinear(24, 16, bias=True, group=group)
        fill(merged, "weight", gate, 0)
        fill(merged, "weight", up, 1)
        fill(row, "weight", down)
        fill(row, "bias", down_bias)
        a, b = merged(x).chunk(2, dim=-1)
        return row(a * b)

    expected = F.linear(F.linear(x, gate) * F.linear(x, up), down, down_bias)
    for result in on_ranks(size, body):
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("size", SIZES)
def test_column_and_replicated(size: int) -> None:
    x, weight, bias = random(3, 8), random(12, 8, seed=1), random(12, seed=2)

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        column = ColumnParallelLinear(8, 12, bias=True, group=group)
        whole = ReplicatedLinear(8, 12, bias=True, group=group)
        for layer in (column, whole):
            fill(layer, "weight", weight)
            fill(layer, "bias", bias)
        return column(x), whole(x)

    expected = F.linear(x, weight, bias)
    results = on_ranks(size, body)
    torch.testing.assert_close(torch.cat([column for column, _ in results], dim=-1), expected)
    for _, whole in results:
        torch.testing.assert_close(whole, expected)


@pytest.mark.parametrize(("size", "kv_heads"), [(1, 2), (2, 2), (4, 4), (4, 2), (4, 1)])
def test_qkv_splits_by_whole_heads_and_replicates_kv(size: int, kv_heads: int) -> None:
    heads, dim = 8, 4
    x, q = random(3, 16), random(heads * dim, 16, seed=1)
    k, v = random(kv_heads * dim, 16, seed=2), random(kv_heads * dim, 16, seed=3)

    def body(group: Group) -> tuple[torch.Tensor, ...]:
        layer = QKVParallelLinear(16, dim, heads, kv_heads, group=group)
        for shard_id, source in (("q", q), ("k", k), ("v", v)):
            fill(layer, "weight", source, shard_id)
        own, own_kv = layer.num_heads * dim, layer.num_kv_heads * dim
        return layer(x).split([own, own_kv, own_kv], dim=-1)

    results = on_ranks(size, body)
    torch.testing.assert_close(torch.cat([r[0] for r in results], dim=-1), F.linear(x, q))
    replicas = max(size // kv_heads, 1)
    for i, source in ((1, k), (2, v)):
        torch.testing.assert_close(torch.cat([r[i] for r in results[::replicas]], dim=-1), F.linear(x, source))
        for rank, result in enumerate(results):  # each query head finds its own KV head on its rank
            torch.testing.assert_close(result[i], results[rank // replicas * replicas][i])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("vocab_size", [64, 61])
def test_vocabulary_is_padded_and_split(size: int, vocab_size: int) -> None:
    weight, hidden, ids = random(vocab_size, 8), random(3, 8, seed=1), torch.tensor([0, 1, 15, 16, 31, 32, 60])

    def body(group: Group) -> tuple[torch.Tensor, torch.Tensor | None]:
        embed, head = VocabParallelEmbedding(vocab_size, 8, group), ParallelLMHead(vocab_size, 8, group)
        fill(embed, "weight", weight)
        fill(head, "weight", weight)
        return embed(ids), head(hidden)

    results = on_ranks(size, body)
    for embedded, _ in results:
        torch.testing.assert_close(embedded, weight[ids])
    torch.testing.assert_close(results[0][1], F.linear(hidden, weight))
    assert all(logits is None for _, logits in results[1:])


def test_shapes_of_qwen3_4b() -> None:
    config = ModelConfig(
        architecture="Qwen3ForCausalLM", vocab_size=64, hidden_size=2560, intermediate_size=9728, num_hidden_layers=1,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, rms_norm_eps=1e-6, rope_theta=1e6,
        max_position_embeddings=8, tie_word_embeddings=True, attention_bias=False, dtype=None, eos_token_ids=(),
    )  # fmt: skip
    for size, (qkv, gate_up, o_in, down_in) in {1: (6144, 19456, 4096, 9728), 2: (3072, 9728, 2048, 4864)}.items():
        with torch.device("meta"):
            layer = Qwen3ForCausalLM(config, FakeGroup(size)).model.layers[0]
        assert layer.self_attn.qkv_proj.weight.shape == (qkv, 2560)
        assert layer.mlp.gate_up_proj.weight.shape == (gate_up, 2560)
        assert layer.self_attn.o_proj.weight.shape == (2560, o_in)
        assert layer.mlp.down_proj.weight.shape == (2560, down_in)


class FakeGroup(Group):
    """One of `size` ranks, the first unless said otherwise, for looking at shapes."""

    def __init__(self, size: int, rank: int = 0) -> None:
        super().__init__()
        self.size, self.rank = size, rank


class CountingFile:
    """A safetensors file that counts the elements read from it."""

    def __init__(self, handle: Any, counts: list[int]) -> None:
        self.handle, self.counts = handle, counts

    def __enter__(self) -> "CountingFile":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handle, name)

    def get_slice(self, name: str) -> "CountingSlice":
        return CountingSlice(self.handle.get_slice(name), self.counts)


class CountingSlice(CountingFile):
    def __getitem__(self, index: Any) -> torch.Tensor:
        part = self.handle[index]
        self.counts.append(part.numel())
        return part


@pytest.mark.parametrize("size", [2, 4])
def test_each_rank_reads_its_own_slices_and_no_more(
    tiny_model: Callable[..., str], monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    path = tiny_model(tie_word_embeddings=False)
    open_file, counts = loader._open, []
    monkeypatch.setattr(loader, "_open", lambda file: CountingFile(open_file(file), counts))
    for rank in range(size):
        model = Qwen3ForCausalLM(ModelConfig.from_pretrained(path), FakeGroup(size, rank))
        counts.clear()
        loader.load_model(model, path)
        assert sum(counts) == sum(param.numel() for param in model.parameters())


def test_random_weights_differ_by_rank_and_have_the_scale_of_the_whole(tiny_model: Callable[..., str]) -> None:
    config = ModelConfig.from_pretrained(tiny_model())
    models = [Qwen3ForCausalLM(config, FakeGroup(4, rank)) for rank in range(4)]
    for rank, model in enumerate(models):
        loader.load_dummy(model, 0, rank)
    first, second = (model.model.layers[0].mlp.down_proj.weight for model in models[:2])
    assert not torch.equal(first, second)
    parts = torch.cat([model.model.layers[0].mlp.down_proj.weight for model in models], dim=1)
    assert parts.shape == (64, 128) and 0.9 < parts.std() * 128**0.5 < 1.1


@pytest.mark.parametrize(
    ("make", "numbers"),
    [
        (lambda g: ColumnParallelLinear(8, 9, group=g), "9.*4"),
        (lambda g: RowParallelLinear(10, 8, group=g), "10.*4"),
        (lambda g: QKVParallelLinear(8, 4, 6, 4, group=g), "6.*4"),
        (lambda g: QKVParallelLinear(8, 4, 12, 3, group=g), "4.*3"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_numbers(make: Callable[[Group], object], numbers: str) -> None:
    with pytest.raises(ValueError, match=numbers):
        make(FakeGroup(4))


def test_wrong_checkpoint_shape_is_refused_with_both() -> None:
    layer = ColumnParallelLinear(8, 12)
    with pytest.raises(ValueError, match=r"\(13, 8\).*12"):
        fill(layer, "weight", random(13, 8))
    with pytest.raises(ValueError, match=r"\(12, 9\).*\(12, 8\)"):
        fill(layer, "weight", random(12, 9))
