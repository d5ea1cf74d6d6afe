"""Kernels alone, in CUDA graphs, over enough different memory that the L2 does not help.

python benchmarks/bench_kernels.py linear     the layers' matmuls for a few rows, ours against cuBLAS
python benchmarks/bench_kernels.py prefill    prefill attention, tile configurations and flash-attn
python benchmarks/bench_kernels.py decode     paged decode attention: tiles, stages, and how many pieces
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanovllm.kernels import decode_attention, prefill_attention, skinny_linear, small_linear

DEVICE = "cuda"


def time_us(step: Callable[[], object], repeats: int = 10) -> float:
    """Microseconds of one `step`, captured in a graph and replayed; median of three blocks of `repeats`."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    blocks = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(repeats):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        blocks.append(start.elapsed_time(end) * 1000 / repeats)
    return sorted(blocks)[1]


def bench_linear() -> None:
    layers = 28
    shapes = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
    shapes |= {"8b qkv": (6144, 4096), "8b o": (4096, 4096), "8b gate_up": (24576, 4096), "8b down": (4096, 12288)}
    print("us a call; gate_up without SiLU-mul in cuBLAS, with it in ours")
    print(f"{'matrix':>12} {'rows':>4} {'bytes':>6} {'cuBLAS':>7} {'small':>7} {'skinny':>7}")
    for name, (n, k) in shapes.items():
        weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) / k**0.5 for _ in range(layers)]
        for rows in (1, 2, 4, 8, 16):
            x = torch.randn(rows, k, device=DEVICE, dtype=torch.bfloat16)
            theirs = time_us(lambda: [F.linear(x, w) for w in weights]) / layers
            ours = {}
            for kernel in (small_linear.small_linear, skinny_linear.skinny_linear):
                if kernel is small_linear.small_linear and rows > small_linear.MAX_ROWS:
                    continue
                torch.testing.assert_close(kernel(x, weights[0]), F.linear(x, weights[0]), rtol=3e-2, atol=3e-2)
                gated = "gate_up" in name
                ours[kernel.__name__] = time_us(lambda: [kernel(x, w, gated=gated) for w in weights]) / layers
            print(
                f"{name:>12} {rows:>4} {n * k * 2 / 4.39e6:6.2f} {theirs:7.2f} "
                f"{ours.get('small_linear', float('nan')):7.2f} {ours['skinny_linear']:7.2f}"
            )


def bench_prefill() -> None:
    configs = [
        (128, 128, 8, 2),
        (128, 128, 8, 3),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (64, 128, 4, 3),
        (64, 64, 4, 3),
        (128, 64, 4, 2),
    ]
    hq, hkv, d = 16, 8, 128
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        flash_attn_varlen_func = None
    for batch, length in ((32, 512), (16, 1024), (4, 4096), (1, 16384), (1, 32768)):
        qkv = torch.randn(batch * length, hq + 2 * hkv, d, device=DEVICE, dtype=torch.bfloat16)
        q, k, v = qkv.split([hq, hkv, hkv], dim=1)
        cu = torch.arange(0, batch * length + 1, length, device=DEVICE, dtype=torch.int32)
        flops = batch * 4 * hq * d * length * (length + 1) / 2
        block_tables = torch.arange(batch * length // 256, device=DEVICE, dtype=torch.int32).view(batch, -1)
        caches = [t.contiguous().view(-1, 256, hkv, d) for t in (k, v)]
        results, expected = {}, None
        if flash_attn_varlen_func is not None:
            expected = flash_attn_varlen_func(q, k, v, cu, cu, length, length, causal=True)
            results["flash_attn"] = time_us(
                lambda: flash_attn_varlen_func(q, k, v, cu, cu, length, length, causal=True), 4
            )
        for config in configs:
            prefill_attention._tile_config = lambda *_: config
            try:
                out = prefill_attention.prefill_attention(q, k, v, cu, cu, length, d**-0.5)
                if expected is not None:
                    torch.testing.assert_close(out, expected, rtol=3e-2, atol=3e-2)
                results[config] = time_us(
                    lambda: prefill_attention.prefill_attention(q, k, v, cu, cu, length, d**-0.5), 4
                )
                results[("paged", *config)] = time_us(
                    lambda: prefill_attention.prefill_attention(q, *caches, cu, cu, length, d**-0.5, block_tables),
                    4,
                )
            except Exception as error:
                print(config, type(error).__name__, str(error)[:80])
        row = ", ".join(f"{name}: {flops / us / 1e6:.0f}" for name, us in results.items())
        print(f"{batch} x {length}, TFLOP/s: {row}")


def bench_decode() -> None:
    hq, hkv, d, layers = 16, 8, 128, 8
    for batch, low, high in (
        (256, 100, 1600),
        (64, 100, 1600),
        (16, 500, 1500),
        (1, 800, 800),
        (1, 4000, 4000),
        (8, 8000, 16000),
    ):
        lengths = torch.linspace(low, high, batch).int()
        width = -(-max(high, 4096) // 256)
        num_blocks = int((lengths + 255).div(256, rounding_mode="floor").sum())
        caches = [torch.randn(2, num_blocks, 256, hkv, d, device=DEVICE, dtype=torch.bfloat16) for _ in range(layers)]
        tables, first = torch.zeros(batch, width, dtype=torch.int32), 0
        for row, length in enumerate(lengths.tolist()):
            n = -(-length // 256)
            tables[row, :n] = torch.arange(first, first + n)
            first += n
        tables, lens = tables.to(DEVICE), lengths.to(DEVICE)
        q = torch.randn(batch, hq, d, device=DEVICE, dtype=torch.bfloat16)
        num_bytes = int(lengths.sum()) * hkv * d * 2 * 2
        results = {}
        at_once, config = decode_attention.PROGRAMS_AT_ONCE, decode_attention._config
        for wave in (2, 3, 4):  # programs of a multiprocessor
            for tile_config in ((32, 3, 2), (64, 2, 2), (64, 3, 2), (64, 3, 4), (128, 2, 4)):
                decode_attention.PROGRAMS_AT_ONCE = wave
                decode_attention._config = lambda *_: tile_config
                results[(wave, *tile_config)] = time_us(
                    lambda: [
                        decode_attention.decode_attention(q, k, v, tables, lens, width * 256, d**-0.5)
                        for k, v in caches
                    ]
                ) / layers  # fmt: skip
        decode_attention.PROGRAMS_AT_ONCE, decode_attention._config = at_once, config
        best = sorted(results.items(), key=lambda item: item[1])[:6]
        row = ", ".join(f"{name}: {us:.1f} us {num_bytes / us / 1e6:.2f} TB/s" for name, us in best)
        print(f"{batch} x {low}..{high}, best (programs at once, tile, stages, warps): {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("linear", "prefill", "decode"))
    {"linear": bench_linear, "prefill": bench_prefill, "decode": bench_decode}[parser.parse_args().what]()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
