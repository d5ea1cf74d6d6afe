"""The samplers alone: microseconds for a decode step's logits, plain and with filters.

python benchmarks/bench_sampling.py            207 rows and 1 row, by shape of the distribution and filters
python benchmarks/bench_sampling.py --sweep    the filter kernel's configurations, to choose one

Each figure is one launch inside a CUDA graph, over enough copies of the logits that the L2 starts without them. Every
filtered figure is preceded by a comparison with the plain twin.
"""

import argparse
import itertools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

from bench_kernels import DEVICE, time_us

from nanovllm.kernels import filtered_sample as kernel
from nanovllm.kernels.sample import sample
from nanovllm.layers.filters import FilterTables, filtered_sample, filtered_sample_plain, log_min_p

VOCAB = 151_936
FILTERS = {  # top_k, top_p, min_p
    "none": (0, 1.0, 0.0),
    "top_k 20": (20, 1.0, 0.0),
    "top_p 0.95": (0, 0.95, 0.0),
    "min_p 0.05": (0, 1.0, 0.05),
    "top_k 20, top_p 0.95": (20, 0.95, 0.0),
    "top_k 1000, top_p 0.95": (1000, 0.95, 0.0),
    "all three": (50, 0.95, 0.05),
}


def logits_of(kind: str, num_rows: int) -> torch.Tensor:
    """bfloat16 logits [num_rows, VOCAB].

    peaked: a bulk and a falling tail of a few hundred likelier tokens, as a language model gives them.
    """
    noise = torch.randn(num_rows, VOCAB, device=DEVICE)
    if kind == "peaked":
        tail = torch.linspace(12, 0, 300, device=DEVICE)
        places = torch.rand(num_rows, VOCAB, device=DEVICE).topk(300).indices
        noise = (2 * noise).scatter_add_(1, places, 10 + tail.expand(num_rows, -1))
    return noise.mul_(0.0 if kind == "equal" else 1.0).bfloat16()


def tables_of(num_rows: int, top_k: int, top_p: float, min_p: float) -> FilterTables:
    def column(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.full((num_rows,), value, dtype=dtype, device=DEVICE)

    seeds = torch.arange(num_rows, device=DEVICE) * 2**33
    return FilterTables(seeds, column(0.6), column(top_k, torch.int32), column(top_p), column(log_min_p(min_p)))


def check(logits: torch.Tensor, tables: FilterTables) -> int:
    """In how many of at most 16 rows the kernel draws another token than its twin; top_p's rounding can make it so."""
    rows = torch.arange(min(len(logits), 16), device=DEVICE)
    ours = filtered_sample(logits, rows, rows, rows, tables)
    return int((ours != filtered_sample_plain(logits, rows, rows, rows, tables)).sum())


def measure(kind: str, num_rows: int, name: str) -> tuple[float, int]:
    """(microseconds of a launch, rows that differ from the twin)."""
    copies = max(1, 512 // num_rows)  # 150 MB and more
    copies = min(copies, 16) if num_rows > 1 else 400
    many = [logits_of(kind, num_rows) for _ in range(min(copies, 4))]
    if num_rows == 1:
        many = list(logits_of(kind, copies).split(1))
    rows, tables = torch.arange(num_rows, device=DEVICE), tables_of(num_rows, *FILTERS[name])
    if name == "none":
        us = time_us(lambda: [sample(x, tables.temperatures, tables.seeds, rows) for x in many], 4) / len(many)
        return us, 0
    differing = check(many[0], tables)
    return time_us(lambda: [filtered_sample(x, rows, rows, rows, tables) for x in many], 4) / len(many), differing


def table() -> None:
    print(f"{'rows':>5} {'logits':>8}  us a launch (rows that differ from the twin), by filters")
    for num_rows, kind in itertools.product((207, 1), ("peaked", "normal", "equal")):
        figures = {name: measure(kind, num_rows, name) for name in FILTERS}
        cells = ", ".join(f"{name}: {us:.1f}" + (f" ({bad})" if bad else "") for name, (us, bad) in figures.items())
        print(f"{num_rows:>5} {kind:>8}  {cells}", flush=True)


def sweep() -> None:
    names = ("top_k 20, top_p 0.95", "top_p 0.95")
    for block, warps, stages in itertools.product((2048, 4096, 8192, 16384), (4, 8, 16, 32), (1, 2, 3)):
        if not 8 <= block // (32 * warps) <= 32:  # logits of a thread
            continue
        kernel.BLOCK, kernel.NUM_WARPS, kernel.STAGES = block, warps, stages
        kernel.CAPACITY = max(2 * block, 16384)
        cells = []
        try:
            for name, kind, num_rows in itertools.product(names, ("peaked", "normal"), (207, 1)):
                us, differing = measure(kind, num_rows, name)
                cells.append(f"{name}, {kind}, {num_rows}: {us:.1f}" + (f" ({differing})" if differing else ""))
        except Exception as error:
            cells.append(f"{type(error).__name__}: {str(error)[:80]}")
        print(f"BLOCK {block}, {warps} warps, {stages} stages: " + "; ".join(cells), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="try the kernel's configurations instead")
    args = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, {VOCAB} columns of bfloat16, temperature 0.6")
    sweep() if args.sweep else table()


if __name__ == "__main__":
    with torch.inference_mode():
        main()
