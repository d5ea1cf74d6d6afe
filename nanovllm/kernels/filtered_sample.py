"""Samples rows whose tokens are filtered by top_k, top_p and min_p: exact for any logits, without a sort.

Definition, and the same function in PyTorch: `nanovllm.layers.filters`. In short: tokens are ordered by logit, largest
first, and by id among equals; each filter keeps a beginning of that order; the survivor of the best noisy score wins.

A beginning of the order is fixed by three numbers: the least logit kept at all (`floor`), the logit at which it ends
(`cut`) and how many tokens that have this very logit it still holds (`ties`). One program finds them for a row:

1. One pass takes the largest logit, and BLOCK maxima over every BLOCK-th logit. The k-th largest of these maxima is a
   lower bound of the k-th largest logit, and a close one.
2. Without top_k: a logit is out if the whole vocabulary, were it as small, had less mass than top_p leaves out.
3. Logits that reach the bound are copied to a scratch row with their ids, in order; mostly they are some dozens. Where
   they are too many (flat logits, and top_p alone) the next steps go over the whole row, slower and just as exact.
4. `cut` is found by search, for top_k on counts and then for top_p on masses: a pass compares with three values that
   divide the bracket in four. The bracket is one of integers that order like the floats they stand for, so it ends at
   one distinct logit after at most half as many passes as the dtype has bits.
5. A last pass gives the survivors their noise and takes the best.

Masses are float32, summed in an order that depends on neither the batch nor the device's schedule.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.sample import _log_exponential_noise

BLOCK = 8192
CAPACITY = 2 * BLOCK  # of a scratch row
NUM_WARPS = 16
STAGES = 2  # blocks of a pass that are loaded ahead
MANY = 1 << 30  # more ties than a row can have

MAX_SCALE = tl.constexpr(1e30)  # of 1 / temperature, so that a logit's distance of 0 stays 0


@triton.jit
def _key(x, IS_SHORT: tl.constexpr):
    """The integer of a float32 that orders like it; of the upper 16 bits, if the lower ones are zero in every value."""
    bits = x.to(tl.int32, bitcast=True)
    if IS_SHORT:
        bits = bits >> 16
        return tl.where(bits < 0, bits ^ 0x7FFF, bits).to(tl.int64)
    else:  # noqa: RET505 (a jit function may return from only one of two branches of a constant condition)
        return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _value(key, IS_SHORT: tl.constexpr):
    """The float32 behind a key."""
    key = key.to(tl.int32)
    if IS_SHORT:
        return (tl.where(key < 0, key ^ 0x7FFF, key) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505
        return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _load(ptr, start, n, BLOCK: tl.constexpr):
    """A block of logits as float32; -inf past the end, and for a NaN, which never wins."""
    index = start + tl.arange(0, BLOCK)
    x = tl.load(ptr + index, mask=index < n, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("-inf"))


@triton.jit
def _mass(x, top, scale):
    """Probability of a logit, relative to that of the largest one."""
    return tl.exp((x - top) * scale)


@triton.jit
def _search(
    ptr, n, low, high, needed, top, scale, BY_MASS: tl.constexpr, IS_SHORT: tl.constexpr, BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """The largest logit in [low, high] that is reached by `needed` of the values, or of their mass; else `low`."""
    low_key, high_key = _key(low, IS_SHORT), _key(high, IS_SHORT)
    while low_key < high_key:
        step = (high_key - low_key + 3) >> 2
        key1 = low_key + step
        key2 = tl.minimum(key1 + step, high_key)
        key3 = tl.minimum(key2 + step, high_key)
        value1, value2, value3 = _value(key1, IS_SHORT), _value(key2, IS_SHORT), _value(key3, IS_SHORT)
        sum1 = tl.zeros([BLOCK], tl.float32)
        sum2 = tl.zeros([BLOCK], tl.float32)
        sum3 = tl.zeros([BLOCK], tl.float32)
        for start in tl.range(0, n, BLOCK, num_stages=STAGES):
            x = _load(ptr, start, n, BLOCK)
            # Counts are exact in float32 up to 2 ** 24.
            weight = _mass(x, top, scale) if BY_MASS else tl.full([BLOCK], 1.0, tl.float32)
            sum1 += tl.where(x >= value1, weight, 0.0)
            sum2 += tl.where(x >= value2, weight, 0.0)
            sum3 += tl.where(x >= value3, weight, 0.0)
        # The sums fall from the first to the last, so the answers are yes, then no.
        yes1 = tl.sum(sum1, axis=0) >= needed
        yes2 = tl.sum(sum2, axis=0) >= needed
        yes3 = tl.sum(sum3, axis=0) >= needed
        high_key = tl.where(yes3, high_key, tl.where(yes2, key3 - 1, tl.where(yes1, key2 - 1, key1 - 1)))
        low_key = tl.where(yes3, key3, tl.where(yes2, key2, tl.where(yes1, key1, low_key)))
    return _value(low_key, IS_SHORT)


@triton.jit
def _measure(ptr, n, value, top, scale, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """(how many logits exceed `value`, their mass, how many equal it)."""
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.float32)
    equal = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, n, BLOCK, num_stages=STAGES):
        x = _load(ptr, start, n, BLOCK)
        count += (x > value).to(tl.int32)
        mass += tl.where(x > value, _mass(x, top, scale), 0.0)
        equal += (x == value).to(tl.int32)
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(equal, axis=0)


# Where the columns of one small upload lie must not make another compiled kernel.
@triton.jit(do_not_specialize_on_alignment=["lines_ptr", "rows_ptr", "positions_ptr"])
def _filtered_sample_kernel(
    out_ptr,  # [N] int64
    scratch_ptr,  # [N, CAPACITY] of the logits' dtype
    scratch_ids_ptr,  # [N, CAPACITY] int32
    logits_ptr,  # [B, V]
    lines_ptr,  # [N] int64
    rows_ptr,  # [N] int64
    positions_ptr,  # [N] int64
    seeds_ptr,  # [rows] int64
    temperatures_ptr,  # [rows] float32
    top_ks_ptr,  # [rows] int32, 0: off
    top_ps_ptr,  # [rows] float32
    log_min_ps_ptr,  # [rows] float32
    logits_stride,
    V,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    MANY: tl.constexpr,
    IS_SHORT: tl.constexpr,
    APPROX: tl.constexpr,
):
    i = tl.program_id(0)
    line, row = tl.load(lines_ptr + i), tl.load(rows_ptr + i)
    row_ptr = logits_ptr + line * logits_stride
    temperature = tl.load(temperatures_ptr + row)
    top_k = tl.load(top_ks_ptr + row)
    top_p = tl.load(top_ps_ptr + row)
    log_min_p = tl.load(log_min_ps_ptr + row)
    lane = tl.arange(0, BLOCK)
    own_ptr = scratch_ptr + i.to(tl.int64) * CAPACITY
    own_ids_ptr = scratch_ids_ptr + i.to(tl.int64) * CAPACITY

    # Where the candidates are.
    source, size = row_ptr, tl.full([], 0, tl.int32) + V
    is_copied = tl.full([], 0, tl.int32)
    floor = tl.full([], float("-inf"), tl.float32)
    cut = floor
    ties = tl.full([], MANY, tl.int32)
    if (temperature > 0.0) & ((top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))):
        scale = tl.minimum(1.0 / temperature, MAX_SCALE)
        maxima = tl.full([BLOCK], float("-inf"), tl.float32)
        for start in tl.range(0, V, BLOCK, num_stages=STAGES):
            maxima = tl.maximum(maxima, _load(row_ptr, start, V, BLOCK))
        top = tl.max(maxima, axis=0)
        if top > float("-inf"):
            floor = top + temperature * log_min_p
            cut = floor
            if (top_k > 0) | (top_p < 1.0):
                total = tl.full([], 0.0, tl.float32)
                if top_k > 0:
                    if top_k <= BLOCK:
                        tl.store(own_ptr + lane, maxima.to(own_ptr.dtype.element_ty))
                        tl.debug_barrier()
                        least = tl.min(maxima, axis=0)
                        bound = _search(own_ptr, BLOCK, least, top, top_k, top, scale, False, IS_SHORT, BLOCK, STAGES)
                        floor = tl.maximum(floor, bound)
                        tl.debug_barrier()  # all have read the maxima, which the candidates now overwrite
                else:
                    masses = tl.zeros([BLOCK], tl.float32)
                    for start in tl.range(0, V, BLOCK, num_stages=STAGES):
                        x = _load(row_ptr, start, V, BLOCK)
                        masses += tl.where(x >= floor, _mass(x, top, scale), 0.0)
                    total = tl.sum(masses, axis=0)
                    # V of these are half of what may be left out; the other half is more than rounding can be.
                    negligible = tl.log((1.0 - top_p) * total * 0.5 / V) * temperature
                    floor = tl.maximum(floor, top + negligible)

                num = tl.full([], 0, tl.int32)
                for start in range(0, V, BLOCK):
                    x = _load(row_ptr, start, V, BLOCK)
                    is_candidate = (x >= floor) & (start + lane < V)
                    found = tl.sum(is_candidate.to(tl.int32), axis=0)
                    if (found > 0) & (num + found <= CAPACITY):
                        place = num + tl.cumsum(is_candidate.to(tl.int32), axis=0) - 1
                        tl.store(own_ptr + place, x.to(own_ptr.dtype.element_ty), mask=is_candidate)
                        tl.store(own_ids_ptr + place, start + lane, mask=is_candidate)
                    num += found
                if num <= CAPACITY:
                    # Up to a multiple of 16, which lets the passes load 16 bytes at a time.
                    end = num + tl.arange(0, 16)
                    tl.store(own_ptr + end, float("-inf"), mask=end < CAPACITY)
                    source, size = own_ptr, (num + 15) // 16 * 16
                    is_copied += 1
                tl.debug_barrier()

                cut = floor
                if (top_k > 0) & (num > top_k):
                    cut = _search(source, size, floor, top, top_k, top, scale, False, IS_SHORT, BLOCK, STAGES)
                    above, _, _ = _measure(source, size, cut, top, scale, BLOCK, STAGES)
                    ties = top_k - above
                if top_p < 1.0:
                    _, mass, equal = _measure(source, size, cut, top, scale, BLOCK, STAGES)
                    if top_k > 0:
                        total = mass + tl.minimum(equal, ties).to(tl.float32) * _mass(cut, top, scale)
                    needed = top_p * total
                    nucleus = _search(source, size, cut, top, needed, top, scale, True, IS_SHORT, BLOCK, STAGES)
                    _, mass, _ = _measure(source, size, nucleus, top, scale, BLOCK, STAGES)
                    each = tl.maximum(_mass(nucleus, top, scale), 1e-37)
                    more = tl.ceil((needed - mass) / each)
                    more = tl.minimum(tl.maximum(more, 1.0), 1e9).to(tl.int32)
                    ties = tl.where(nucleus > cut, more, tl.minimum(more, ties))
                    cut = nucleus

    seed, position = tl.load(seeds_ptr + row), tl.load(positions_ptr + i)
    seen = tl.full([], 0, tl.int32)  # tokens of lower ids that have the logit `cut`
    best_score = tl.full([BLOCK], float("-inf"), tl.float32)
    best_token = tl.full([BLOCK], 0, tl.int32)
    for start in range(0, size, BLOCK):
        x = _load(source, start, size, BLOCK)
        token = start + lane
        if is_copied > 0:
            token = tl.load(own_ids_ptr + token, mask=token < size, other=V)
        survives = (x > cut) & (x >= floor)
        is_tie = (x == cut) & (x >= floor)
        found = tl.sum(is_tie.to(tl.int32), axis=0)
        if (seen < ties) & (found > 0):
            if seen + found > ties:
                is_tie = is_tie & (seen + tl.cumsum(is_tie.to(tl.int32), axis=0) <= ties)
            survives = survives | is_tie
        seen += found
        if tl.sum(survives.to(tl.int32), axis=0) > 0:
            score = x
            if temperature > 0.0:
                score = x - temperature * _log_exponential_noise(seed, position, token, APPROX)
            is_better = survives & (score > best_score)  # a later block has larger ids: it has to be better
            best_score = tl.where(is_better, score, best_score)
            best_token = tl.where(is_better, token, best_token)
    best = tl.max(best_score, axis=0)
    winner = tl.min(tl.where(best_score == best, best_token, V), axis=0)
    tl.store(out_ptr + i, winner.to(tl.int64))


def filtered_sample(
    logits: torch.Tensor,
    lines: torch.Tensor,
    rows: torch.Tensor,
    positions: torch.Tensor,
    seeds: torch.Tensor,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor,
    top_ps: torch.Tensor,
    log_min_ps: torch.Tensor,
) -> torch.Tensor:
    """One token id for each of N rows of the logits, [N] int64.

    logits [B, V] of any float dtype, rows may be strided; the rest as in `layers.filters.filtered_sample` and its
    tables. NaN logits never win; the id is always in range.
    """
    num_lines, vocab_size = len(lines), logits.shape[1]
    assert logits.stride(1) == 1, "a row of logits must be contiguous"
    assert lines.is_contiguous() and rows.is_contiguous() and positions.is_contiguous()
    scratch = torch.empty((num_lines, CAPACITY), dtype=logits.dtype, device=logits.device)
    scratch_ids = torch.empty((num_lines, CAPACITY), dtype=torch.int32, device=logits.device)
    out = torch.empty(num_lines, dtype=torch.int64, device=logits.device)
    _filtered_sample_kernel[(num_lines,)](
        out,
        scratch,
        scratch_ids,
        logits,
        lines,
        rows,
        positions,
        seeds,
        temperatures,
        top_ks,
        top_ps,
        log_min_ps,
        logits.stride(0),
        vocab_size,
        CAPACITY=CAPACITY,
        BLOCK=BLOCK,
        STAGES=STAGES,
        MANY=MANY,
        IS_SHORT=logits.dtype == torch.bfloat16,
        APPROX=torch.version.hip is None and logits.is_cuda,  # PTX; the interpreter has none
        num_warps=NUM_WARPS,
    )
    return out
