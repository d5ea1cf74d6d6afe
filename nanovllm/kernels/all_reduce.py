"""One-shot all-reduce of a few rows over peer memory, alone or with the residual addition and RMSNorm that follow it.

Called by `utils/dist.py` for decode steps, whose messages are kilobytes: there a library's all-reduce is all latency.
Every rank has an inbox in its own memory that the others can write. A program has one row: it writes this rank's part
into the peers' inboxes, waits until theirs have arrived in its own, and sums all parts in the order of the ranks, so
that every rank gets the same bits.

There are no flags and no fences: each element says by itself that it has arrived. An inbox is EMPTY, a bit pattern that
no part contains, until a part lies in it, and whoever has read it makes it EMPTY again (Lamport's rule that a word is
its own signal, as in NCCL's LL protocol and TensorRT-LLM's one-shot all-reduce, but without their extra bytes).

Why two halves that take turns suffice: a rank writes a half for call n + 2 only after its call n + 1. That could end
only with the peer's part of call n + 1, which the peer sent after its call n had ended, and with it all reading and
clearing of that half. Calls are counted for each row, which makes each row a channel of its own, and on the device, so
that a captured graph can be replayed. A program waits only for its namesakes on the other ranks, and sends before it
waits: it needs no other program of its own grid to run beside it.
"""

import torch
import triton
import triton.language as tl

from nanovllm.kernels.launch import launch
from nanovllm.kernels.pdl import let_next_start, pdl_options, wait_for_inputs

LOOKS = 2048  # between two looks at the stop flag, which is in the host's memory


@triton.jit
def _all_reduce_kernel(
    out_ptr,  # [T, H]; may be x
    x_ptr,  # [T, H], integers that hold the bits of DTYPE, as all buffers of parts do
    residual_ptr,  # [T, H]; not read without NORM
    new_residual_ptr,  # [T, H]; not written without NORM
    weight_ptr,  # [H]; not read without NORM
    inboxes_ptr,  # [SIZE] int64: address of every rank's inbox, [2, SIZE, max_rows, H]
    calls_ptr,  # [max_rows] int32: calls so far
    stop_ptr,  # [1] int32 in the host's memory: not 0 ends all waiting
    eps,
    max_rows,
    RANK: tl.constexpr,
    SIZE: tl.constexpr,
    H: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    NORM: tl.constexpr,
    LOOKS: tl.constexpr,
    PDL: tl.constexpr,
):
    let_next_start(PDL)
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < H
    Bits: tl.constexpr = x_ptr.dtype.element_ty
    own_inbox = tl.multiple_of(tl.load(inboxes_ptr + RANK).to(tl.pointer_type(Bits)), 16)
    next_inbox = tl.load(inboxes_ptr + (RANK + 1) % SIZE)
    if NORM:
        weight = tl.load(weight_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    wait_for_inputs(PDL)
    call = tl.load(calls_ptr + row)
    half = (call % 2) * SIZE
    x = tl.load(x_ptr + row * H + offsets, mask=mask, other=0)
    if NORM:
        residual = tl.load(residual_ptr + row * H + offsets, mask=mask, other=0.0).to(tl.float32)
    # EMPTY is -1, all bits set, one of many NaNs: a NaN like that becomes another one, with its lowest bit cleared.
    x = tl.where(x == -1, -2, x).to(Bits)
    own_slot = ((half + RANK) * max_rows + row) * H
    for step in tl.static_range(1, SIZE):
        inbox = tl.multiple_of(next_inbox.to(tl.pointer_type(Bits)), 16)
        tl.store(inbox + own_slot + offsets, x, mask=mask)
        next_inbox = tl.load(inboxes_ptr + (RANK + step + 1) % SIZE)
    total = tl.zeros([BLOCK], tl.float32)
    stop = 0
    for source in tl.static_range(SIZE):
        if source == RANK:
            part = x
        else:
            slot = own_inbox + ((half + source) * max_rows + row) * H + offsets
            part = tl.load(slot, mask=mask, other=0, volatile=True)
            looks = 0
            while (tl.max((part == -1).to(tl.int32), axis=0) != 0) & (stop == 0):
                part = tl.load(slot, mask=mask, other=0, volatile=True)
                looks += 1
                if looks % LOOKS == 0:
                    stop = tl.load(stop_ptr, volatile=True)
            tl.store(slot, tl.full([BLOCK], -1, Bits), mask=mask)
        total += part.to(DTYPE, bitcast=True).to(tl.float32)
    tl.store(calls_ptr + row, call + 1)
    if NORM:
        # Rounded where the all-reduce and then add_rms_norm would round.
        total = total.to(DTYPE).to(tl.float32) + residual
        rounded = total.to(DTYPE)
        tl.store(new_residual_ptr + row * H + offsets, rounded, mask=mask)
        total = rounded.to(tl.float32)
        total = (total * tl.rsqrt(tl.sum(total * total, axis=0) / H + eps)).to(DTYPE).to(tl.float32) * weight
    tl.store(out_ptr + row * H + offsets, total.to(DTYPE), mask=mask)


_BITS = {2: torch.int16, 4: torch.int32}
_DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Inboxes:
    """What one rank's kernels need besides their operands."""

    def __init__(
        self,
        rank: int,
        addresses: torch.Tensor,
        max_rows: int,
        hidden_size: int,
        dtype: torch.dtype,
        stop: torch.Tensor,
    ) -> None:
        """`addresses`: [ranks] int64 on the device, of inboxes of `inbox_bytes` bytes, each of them 0xFF.

        `stop`: [1] int32 that the device can read and the host can write at any time; pinned memory on a GPU.
        """
        self.rank, self.size = rank, len(addresses)
        self.addresses = addresses
        self.max_rows, self.hidden_size, self.dtype = max_rows, hidden_size, dtype
        self.calls = torch.zeros(max_rows, dtype=torch.int32, device=addresses.device)
        self.stop = stop

    def fits(self, x: torch.Tensor) -> bool:
        return x.dtype == self.dtype and x.dim() == 2 and x.shape[0] <= self.max_rows and x.shape[1] == self.hidden_size

    @torch.inference_mode()  # in which the flag may have been made
    def break_off(self) -> None:
        """End the wait of every kernel that runs or comes; what they give is no sum. From any thread."""
        self.stop.fill_(1)


def inbox_bytes(size: int, max_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    return 2 * size * max_rows * hidden_size * dtype.itemsize


def all_reduce(x: torch.Tensor, inboxes: Inboxes) -> torch.Tensor:
    """Sum x [T, H] over the ranks, in float32 and in place. Every rank makes the same calls in the same order."""
    _launch(x, x, x, x, x, 0.0, inboxes, is_norm=False)
    return x


def all_reduce_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, inboxes: Inboxes
) -> tuple[torch.Tensor, torch.Tensor]:
    """With s the sum of x [T, H] over the ranks: (rms_norm(s + residual), s + residual), both new."""
    out, new_residual = torch.empty_like(x), torch.empty_like(x)
    _launch(out, x, residual, new_residual, weight, eps, inboxes, is_norm=True)
    return out, new_residual


def _launch(
    out: torch.Tensor,
    x: torch.Tensor,
    residual: torch.Tensor,
    new_residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    inboxes: Inboxes,
    is_norm: bool,
) -> None:
    num_rows, hidden_size = x.shape
    assert inboxes.fits(x), (x.shape, x.dtype)
    assert x.is_contiguous() and residual.is_contiguous()
    # Each element belongs to one thread, whose look at it is the one that counts: at least a warp's worth of them.
    block = max(triton.next_power_of_2(hidden_size), 32)
    launch(
        _all_reduce_kernel,
        (num_rows,),
        out,
        x.view(_BITS[x.dtype.itemsize]),
        residual,
        new_residual,
        weight,
        inboxes.addresses,
        inboxes.calls,
        inboxes.stop,
        eps,
        inboxes.max_rows,
        RANK=inboxes.rank,
        SIZE=inboxes.size,
        H=hidden_size,
        BLOCK=block,
        DTYPE=_DTYPES[x.dtype],
        NORM=is_norm,
        LOOKS=LOOKS,
        num_warps=min(max(block // 256, 1), 16),
        **pdl_options(x.device),
    )
