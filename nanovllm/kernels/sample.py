"""Samples one token per row of the logits in one pass, without a softmax.

With E one exponential variate per token, the token of the largest logit - temperature * log(E) is a draw from the
softmax of logits / temperature. E is a stateless function of (seed, position, token id): its definition, and the same
function in PyTorch, is `nanovllm.layers.sampler.exponential_noise`.

The vocabulary is cut into chunks, one program each, so that one row already fills the GPU. A chunk leaves its best
(score, id); a second, tiny kernel picks the best chunk of a row. The lowest id wins a tie.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs

CHUNK = 2048


@triton.jit
def _mix(x):
    """A bijection of 32-bit integers that spreads every input bit over the output. x: uint32."""
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _log(x, APPROX: tl.constexpr):
    """Natural logarithm; the hardware's own (absolute error below 1e-6 here) is a sixth of the instructions."""
    if APPROX:
        log2 = tl.inline_asm_elementwise("lg2.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
        return log2 * 0.6931471805599453
    else:  # noqa: RET505 (a jit function may return from only one of two branches of a constant condition)
        return tl.log(x)


@triton.jit
def _log_exponential_noise(seed, position, token, APPROX: tl.constexpr):
    """log(E) for a block of token ids; seed is a row's int64 seed."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    key0 = _mix(low ^ _mix(position.to(tl.uint32) + 0x9E3779B9))
    key1 = _mix(high ^ _mix(key0 + 0x85EBCA6B))
    bits = _mix(_mix(token.to(tl.uint32) ^ key0) + key1)
    v = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2 ** -32: uniform in (0, 1]
    # -log(1 - v) loses all precision near 0, where the winners are: its series there.
    series = v * (1.0 + v * (0.5 + v * 0.3333333333333333))
    return _log(tl.where(v < 0.015625, series, -_log(1.0 - v, APPROX)), APPROX)


# Scalars of a row: where they lie makes no difference, and must not make another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["temperatures_ptr", "seeds_ptr", "positions_ptr"])
def _best_of_chunk_kernel(
    best_score_ptr,  # [B, C] float32
    best_id_ptr,  # [B, C] int32
    logits_ptr,  # [B, V]
    temperatures_ptr,  # [B] float32
    seeds_ptr,  # [B] int64
    positions_ptr,  # [B]
    logits_stride,
    V,
    CHUNK: tl.constexpr,
    APPROX: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    chunk, row = tl.program_id(0), tl.program_id(1)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < V
    score = tl.load(logits_ptr + row.to(tl.int64) * logits_stride + token, mask=mask, other=float("-inf"))
    score = score.to(tl.float32)
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0.0:
        seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + row)
        score -= temperature * _log_exponential_noise(seed, position, token, APPROX)
    score = tl.where(mask & (score == score), score, float("-inf"))  # a NaN never wins
    best = tl.max(score, axis=0)
    index = row * tl.num_programs(0) + chunk
    tl.store(best_score_ptr + index, best)
    tl.store(best_id_ptr + index, tl.min(tl.where(score == best, token, V), axis=0))


@triton.jit
def _best_of_row_kernel(out_ptr, best_score_ptr, best_id_ptr, C, V, C_PAD: tl.constexpr, PDL: tl.constexpr):
    let_next_start(PDL)
    wait_for_inputs(PDL)
    row = tl.program_id(0)
    chunk = tl.arange(0, C_PAD)
    mask = chunk < C
    score = tl.load(best_score_ptr + row * C + chunk, mask=mask, other=float("-inf"))
    token = tl.load(best_id_ptr + row * C + chunk, mask=mask, other=V)
    best = tl.max(score, axis=0)
    tl.store(out_ptr + row, tl.min(tl.where(score == best, token, V), axis=0).to(tl.int64))


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token id per row, [B] int64.

    logits [B, V] of any float dtype, rows may be strided; temperatures [B] float32, 0 takes the exact argmax; seeds [B]
    int64 and positions [B] int32 or int64 are the keys of the noise. NaN logits never win; the id is always in range.
    """
    batch, vocab_size = logits.shape
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    num_chunks = triton.cdiv(vocab_size, CHUNK)
    best_score = torch.empty((batch, num_chunks), dtype=torch.float32, device=logits.device)
    best_id = torch.empty((batch, num_chunks), dtype=torch.int32, device=logits.device)
    out = torch.empty((batch,), dtype=torch.int64, device=logits.device)
    launch(
        _best_of_chunk_kernel,
        (num_chunks, batch),
        best_score,
        best_id,
        logits,
        temperatures,
        seeds,
        positions,
        logits.stride(0),
        vocab_size,
        CHUNK=CHUNK,
        APPROX=torch.version.hip is None and logits.is_cuda,  # PTX; the interpreter has none
        num_warps=4,
        **pdl_options(logits.device),
    )
    launch(
        _best_of_row_kernel,
        (batch,),
        out,
        best_score,
        best_id,
        num_chunks,
        vocab_size,
        C_PAD=triton.next_power_of_2(num_chunks),
        num_warps=1,
        **pdl_options(logits.device),
    )
    return out
