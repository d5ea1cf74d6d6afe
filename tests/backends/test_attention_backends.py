"""Every attention backend against the same expectations.

The torch backend is held against a softmax in float64, and the other backends against the torch backend. Without a GPU
the Triton kernels run interpreted, in float32 and tiny; with one they are compiled, and bfloat16 and real sizes join.
"""

import pytest
import torch

from nanovllm.utils.context import Context

HAS_CUDA = torch.cuda.is_available()
DTYPES = [torch.float32] + [torch.float16, torch.bfloat16] * HAS_CUDA
# Absolute, of outputs of about 1. Rounding the weights to the dtype before they meet the values costs half a unit in
# the last place of 1; the reference does the same in another order.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}

# Groups of 1, 2, 3 and 8 query heads per KV head; head_dim a power of two and not: num_heads, num_kv_heads, head_dim
SHAPES = [(8, 1, 16), (4, 2, 64), (3, 1, 80), (1, 1, 128)]
BLOCK_SIZES = [16, 48, 256]
LENS = [0, 1, 15, 16, 17, 255, 256, 257]

GPU_BACKENDS = ["triton", pytest.param("flash_attn", marks=pytest.mark.gpu)]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def softmax_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One sequence in float64: q [q_len, Hq, D], k and v [k_len, Hkv, D]; the last query sees every key."""
    q, k, v = (x.double().cpu() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    visible = torch.ones(scores.shape[1:], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, float("-inf")).softmax(dim=-1), v)


def random_q(num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A strided view, as of packed qkv."""
    generator = torch.Generator().manual_seed(num_tokens)
    packed = torch.randn(num_tokens, num_heads + 2, head_dim, generator=generator)
    return packed.to(device, dtype)[:, :num_heads]


def assert_near(out: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype and out.is_contiguous()
    torch.testing.assert_close(out.double().cpu(), expected.double().cpu(), rtol=0, atol=TOLERANCE[dtype])


# The reference against float64.


@dtypes
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_decode(shape: tuple, block_size: int, dtype: torch.dtype, device, backend_for, paged_batch) -> None:
    num_heads, num_kv_heads, head_dim = shape
    backend = backend_for("torch", dtype, *shape, block_size)
    batch = paged_batch(LENS, block_size, num_kv_heads, head_dim, dtype)
    q = random_q(len(LENS), num_heads, head_dim, dtype, device)
    expected = torch.zeros(q.shape, dtype=torch.float64)
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        if len(keys):
            expected[row] = softmax_attention(q[row : row + 1], keys, values, 0.2)[0]
    for bound in (max(LENS), max(LENS) + 1, 10_000):
        out = backend.decode(q, batch.k_cache, batch.v_cache, batch.decode_context(bound), 0.2)
        assert_near(out, expected, dtype)


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_torch_prefill(shape: tuple, dtype: torch.dtype, device, backend_for, paged_batch) -> None:
    num_heads, num_kv_heads, head_dim = shape
    backend = backend_for("torch", dtype, *shape, 16)
    q_lens, k_lens = [1, 20, 33, 1], [75, 20, 97, 1]
    batch = paged_batch(k_lens, 16, num_kv_heads, head_dim, dtype)
    q = random_q(sum(q_lens), num_heads, head_dim, dtype, device)
    parts = list(zip(q.split(q_lens), batch.keys, batch.values, strict=True))

    paged = backend.prefill(q, None, None, batch.k_cache, batch.v_cache, batch.prefill_context(q_lens), 0.2)
    assert_near(paged, torch.cat([softmax_attention(*part, 0.2) for part in parts]), dtype)

    k, v = (torch.cat([x[-q_len:] for x, q_len in zip(xs, q_lens, strict=True)]) for xs in (batch.keys, batch.values))
    context = batch.prefill_context(q_lens, q_lens)
    context.block_tables = None
    packed = backend.prefill(q, k, v, None, None, context, 0.2)
    parts = zip(q.split(q_lens), k.split(q_lens), v.split(q_lens), strict=True)
    assert_near(packed, torch.cat([softmax_attention(*part, 0.2) for part in parts]), dtype)


def test_torch_decode_ignores_garbage_in_unused_table_entries(device, backend_for, paged_batch) -> None:
    backend = backend_for("torch", torch.float32, 2, 1, 16, 16)
    batch = paged_batch([5, 40, 0], 16, 1, 16, torch.float32)
    q = random_q(3, 2, 16, torch.float32, device)
    expected = backend.decode(q, batch.k_cache, batch.v_cache, batch.decode_context(), 0.2)
    batch.block_tables[0, 1:] = -1
    batch.block_tables[1, 3:] = 10**6
    batch.block_tables[2] = -1
    out = backend.decode(q, batch.k_cache, batch.v_cache, batch.decode_context(100), 0.2)
    assert_near(out, expected, torch.float32)


# The others against the reference.


@dtypes
@pytest.mark.parametrize(("shape", "block_size"), list(zip(SHAPES, [256, 16, 48, 256], strict=True)))
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_decode_equals_torch(
    name: str, shape: tuple, block_size: int, dtype: torch.dtype, device, backend_for, paged_batch
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    block_size = 256 if name == "flash_attn" else block_size
    backend, torch_backend = (backend_for(each, dtype, *shape, block_size) for each in (name, "torch"))
    batch = paged_batch(LENS, block_size, num_kv_heads, head_dim, dtype)
    q = random_q(len(LENS), num_heads, head_dim, dtype, device)
    context = batch.decode_context(max_context_len=300)
    out = backend.decode(q, batch.k_cache, batch.v_cache, context, head_dim**-0.5)
    expected = torch_backend.decode(q, batch.k_cache, batch.v_cache, context, head_dim**-0.5)
    assert out.isfinite().all(), "NaN of unused slots leaked"
    assert_near(out, expected, dtype)


@dtypes
@pytest.mark.parametrize(("shape", "block_size"), list(zip(SHAPES, [256, 16, 48, 256], strict=True)))
@pytest.mark.parametrize(
    "is_paged", [pytest.param(False, marks=pytest.mark.slow, id="packed"), pytest.param(True, id="prefix")]
)
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_prefill_equals_torch(
    name: str, is_paged: bool, shape: tuple, block_size: int, dtype: torch.dtype, device, backend_for, paged_batch
) -> None:
    num_heads, num_kv_heads, head_dim = shape
    block_size = 256 if name == "flash_attn" else block_size
    backend, torch_backend = (backend_for(each, dtype, *shape, block_size) for each in (name, "torch"))
    q_lens = [1, 20, 33]
    k_lens = [75, 20, 97] if is_paged else q_lens
    batch = paged_batch(k_lens, block_size, num_kv_heads, head_dim, dtype)
    context = batch.prefill_context(q_lens)
    if is_paged:
        arguments = (None, None, batch.k_cache, batch.v_cache, context, head_dim**-0.5)
    else:
        context.block_tables = None
        arguments = (torch.cat(batch.keys), torch.cat(batch.values), None, None, context, head_dim**-0.5)
    q = random_q(sum(q_lens), num_heads, head_dim, dtype, device)
    out = backend.prefill(q, *arguments)
    assert out.isfinite().all(), "NaN of unused slots leaked"
    assert_near(out, torch_backend.prefill(q, *arguments), dtype)


@dtypes
@pytest.mark.parametrize("name", ["torch", *GPU_BACKENDS])
def test_chunks_equal_the_whole_prompt(name: str, dtype: torch.dtype, device, backend_for, paged_batch) -> None:
    num_heads, num_kv_heads, head_dim = 2, 1, 64
    block_size = 256 if name == "flash_attn" else 16
    backend = backend_for(name, dtype, num_heads, num_kv_heads, head_dim, block_size)
    length, chunk = 70, 32
    batch = paged_batch([length], block_size, num_kv_heads, head_dim, dtype)
    q = random_q(length, num_heads, head_dim, dtype, device)
    expected = softmax_attention(q, batch.keys[0], batch.values[0], 0.2)
    chunks = []
    for start in range(0, length, chunk):
        end = min(start + chunk, length)
        context = batch.prefill_context([end - start], [end])  # keys end at the chunk, not at the prompt
        chunks.append(backend.prefill(q[start:end], None, None, batch.k_cache, batch.v_cache, context, 0.2))
    assert len(chunks) == 3
    assert_near(torch.cat(chunks), expected, dtype)


@dtypes
@pytest.mark.parametrize("is_paged", [False, True], ids=["packed", "paged"])
@pytest.mark.parametrize("name", ["torch", *GPU_BACKENDS])
def test_the_last_layers_queries(
    name: str, is_paged: bool, dtype: torch.dtype, device, backend_for, paged_batch
) -> None:
    """One query, or none, of sequences that compute more keys than that."""
    block_size = 256 if name == "flash_attn" else 16
    backend = backend_for(name, dtype, 4, 2, 64, block_size)
    q_lens = [0, 1, 0, 1, 1, 0]
    batch = paged_batch([20, 75, 3, 97, 1, 40], block_size, 2, 64, dtype)
    q = random_q(sum(q_lens), 4, 64, dtype, device)
    context = batch.prefill_context(q_lens)
    if is_paged:
        out = backend.prefill(q, None, None, batch.k_cache, batch.v_cache, context, 0.2)
    else:
        context.block_tables = None
        out = backend.prefill(q, torch.cat(batch.keys), torch.cat(batch.values), None, None, context, 0.2)
    parts = zip(q.split(q_lens), batch.keys, batch.values, strict=True)
    assert_near(out, torch.cat([softmax_attention(*part, 0.2) for part in parts]), dtype)


@pytest.mark.parametrize("name", ["torch", *GPU_BACKENDS])
def test_rows_of_length_0_are_zeros_even_alone(name: str, device, backend_for, paged_batch) -> None:
    dtype = torch.bfloat16 if name == "flash_attn" else torch.float32
    backend = backend_for(name, dtype, 2, 1, 64, 256)
    batch = paged_batch([0, 0], 256, 1, 64, dtype)
    out = backend.decode(
        random_q(2, 2, 64, dtype, device), batch.k_cache, batch.v_cache, batch.decode_context(256), 0.2
    )
    assert out.shape == (2, 2, 64) and not out.any()


# Real sizes and CUDA graphs, on a GPU only.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [(16, 8, 128), (32, 4, 64), (20, 4, 80)])
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_real_sizes(name: str, shape: tuple, dtype: torch.dtype, device, backend_for, paged_batch) -> None:
    num_heads, num_kv_heads, head_dim = shape
    backend, torch_backend = (backend_for(each, dtype, *shape, 256) for each in (name, "torch"))
    lens = [1, 2000, 513, 4096, 1025, 0, 255, 777] * 4
    batch = paged_batch(lens, 256, num_kv_heads, head_dim, dtype)
    q = random_q(len(lens), num_heads, head_dim, dtype, device)
    for bound in (4096, 32768):
        arguments = (q, batch.k_cache, batch.v_cache, batch.decode_context(bound), head_dim**-0.5)
        assert_near(backend.decode(*arguments), torch_backend.decode(*arguments), dtype)

    k_lens = [1, 2000, 513, 4096, 1025]
    q_lens = [1, 1000, 513, 300, 1024]
    batch = paged_batch(k_lens, 256, num_kv_heads, head_dim, dtype)
    q = random_q(sum(q_lens), num_heads, head_dim, dtype, device)
    arguments = (q, None, None, batch.k_cache, batch.v_cache, batch.prefill_context(q_lens), head_dim**-0.5)
    assert_near(backend.prefill(*arguments), torch_backend.prefill(*arguments), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_a_long_context_beside_a_short_one(name: str, device, backend_for, paged_batch) -> None:
    shape = (4, 1, 64)
    backend, torch_backend = (backend_for(each, torch.bfloat16, *shape, 256) for each in (name, "torch"))
    batch = paged_batch([100_000, 5], 256, 1, 64, torch.bfloat16)
    q = random_q(2, 4, 64, torch.bfloat16, device)
    arguments = (q, batch.k_cache, batch.v_cache, batch.decode_context(131_072), 0.125)
    assert_near(backend.decode(*arguments), torch_backend.decode(*arguments), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["torch", *GPU_BACKENDS])
def test_decode_in_a_cuda_graph(name: str, device, backend_for, paged_batch) -> None:
    """Captured with one set of lengths, replayed with others, padding rows included."""
    dtype = torch.bfloat16
    backend = backend_for(name, dtype, 16, 8, 128, 256)
    lens = [3, 700, 256, 1500]
    batch = paged_batch(lens, 256, 8, 128, dtype)
    context = batch.decode_context(max_context_len=batch.block_tables.shape[1] * 256)
    q = random_q(4, 16, 128, dtype, device)
    static_q, static_lens = q.clone(), torch.zeros_like(context.context_lens)
    graph_context = Context(
        block_tables=batch.block_tables, context_lens=static_lens, max_context_len=context.max_context_len
    )

    def step() -> torch.Tensor:
        return backend.decode(static_q, batch.k_cache, batch.v_cache, graph_context, 0.1)

    step()  # compiles outside of the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for new_lens in (lens, [1, 0, 200, 1025]):
        static_lens.copy_(torch.tensor(new_lens, dtype=torch.int32))
        graph.replay()
        context.context_lens = torch.tensor(new_lens, dtype=torch.int32, device=device)
        assert_near(out, backend.decode(q, batch.k_cache, batch.v_cache, context, 0.1), dtype)
