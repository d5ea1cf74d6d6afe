"""Microseconds of one all-reduce on all visible GPUs: NCCL, torch's one-shot kernel, and ours.

    python benchmarks/bench_all_reduce.py
    python benchmarks/bench_all_reduce.py --hidden-size 5120 --rows 1 16 207 --json out.json

72 calls, two for each layer of Qwen3-8B, in one CUDA graph, as in a decode step. `_norm` is the all-reduce with the
residual addition and RMSNorm behind it: for NCCL two kernels, for ours one. `logits_` gathers the rows' logits, half of
151,936 columns on each of two ranks. torch's kernel (`torch.ops.symm_mem.one_shot_all_reduce`) needs no multicast, and
none is used. Sums are checked; a variant that fails does not lose the others; what hangs is killed after --timeout.
"""

import argparse
import json
import multiprocessing
import os
import queue
import statistics
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d as c10d

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanovllm.engine.workers import connect_gpus
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.utils.dist import Group

CALLS = 72
REPLAYS = 23
VOCAB_SIZE = 151936
Step = Callable[[torch.Tensor], torch.Tensor]
VARIANTS = (
    "nccl",
    "nccl_events",
    "ours",
    "nccl_norm",
    "ours_norm",
    "logits_all_gather",
    "logits_gather",
    "torch_one_shot",
)


class Bench:
    """One rank's groups and buffers, and the variants, each a method that gives a step for so many rows."""

    def __init__(self, rank: int, size: int, store: dist.Store, max_rows: int, hidden_size: int) -> None:
        self.rank, self.size, self.store = rank, size, store
        self.max_rows, self.hidden_size = max_rows, hidden_size
        self.device = torch.device("cuda", rank)
        self.pg = connect_gpus(dist.PrefixStore("nccl", store), rank, size, timedelta(seconds=60))
        self.plain, self.peers = Group(rank, size, self.pg), Group(rank, size, self.pg)
        self.symmetric: torch.Tensor | None = None
        with self.device:
            self.norm = RMSNorm(hidden_size).bfloat16()
            self.residual = torch.ones(max_rows, hidden_size, dtype=torch.bfloat16)

    def nccl(self, rows: int) -> Step:
        return self.plain.all_reduce

    def nccl_events(self, rows: int) -> Step:
        """On NCCL's own stream, ordered by two events."""

        def step(x: torch.Tensor) -> torch.Tensor:
            self.pg.allreduce([x], c10d.AllreduceOptions()).wait()
            return x

        return step

    def nccl_norm(self, rows: int) -> Step:
        return lambda x: self.plain.all_reduce_norm(x, self.residual[:rows], self.norm)[1]

    def ours(self, rows: int) -> Step:
        if self.peers._inboxes is None:
            self.peers.use_peer_memory(self.hidden_size, self.max_rows, torch.bfloat16, self.device)
        assert self.peers._inboxes is not None, "no peer memory"
        return self.peers.all_reduce

    def ours_norm(self, rows: int) -> Step:
        self.ours(rows)
        return lambda x: self.peers.all_reduce_norm(x, self.residual[:rows], self.norm)[1]

    def logits_all_gather(self, rows: int) -> Step:
        """What `Group.gather` does."""
        shard = torch.ones(rows, VOCAB_SIZE // self.size, dtype=torch.bfloat16, device=self.device)

        def step(x: torch.Tensor) -> torch.Tensor:
            self.plain.gather(shard)
            return x

        return step

    def logits_gather(self, rows: int) -> Step:
        """Sent to rank 0 alone."""
        shard = torch.ones(rows, VOCAB_SIZE // self.size, dtype=torch.bfloat16, device=self.device)
        options = c10d.GatherOptions()
        options.rootRank, options.asyncOp = 0, False

        def step(x: torch.Tensor) -> torch.Tensor:
            parts = [[torch.empty_like(shard) for _ in range(self.size)]] if self.rank == 0 else []
            work = self.pg.gather(parts, [shard], options)
            if work is not None:
                work.wait()
            return x

        return step

    def torch_one_shot(self, rows: int) -> Step:
        from torch._C._distributed_c10d import _SymmetricMemory

        name, numel = "bench", self.max_rows * self.hidden_size
        if self.symmetric is None:
            _SymmetricMemory.set_group_info(name, self.rank, self.size, dist.PrefixStore("symmetric", self.store))
            self.symmetric = _SymmetricMemory.empty_strided_p2p((numel,), (1,), torch.bfloat16, self.device, name)
            _SymmetricMemory.rendezvous(self.symmetric)

        def step(x: torch.Tensor) -> torch.Tensor:
            view = self.symmetric[: x.numel()].view_as(x)
            view.copy_(x)
            return torch.ops.symm_mem.one_shot_all_reduce(view, "sum", name)

        return step

    def part(self, rank: int, rows: int) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(1000 * rows + rank)
        return torch.randn(rows, self.hidden_size, generator=generator, device=self.device).bfloat16()

    def measure(self, name: str, rows: int) -> float:
        """Microseconds a call. Raises AssertionError for a wrong sum."""
        calls = 4 if name.startswith("logits") else CALLS
        step, x = getattr(self, name)(rows), self.part(self.rank, rows)
        microseconds, result = time_graph(step, x, calls)
        if not name.startswith("logits"):
            expected = sum(self.part(rank, rows).float() for rank in range(self.size))
            if name.endswith("norm"):
                expected += self.residual[:rows]
            error = (result.float() - expected).abs().max().item()
            assert error < 0.1, f"wrong by {error}"
        return microseconds


def time_graph(step: Step, x: torch.Tensor, calls: int) -> tuple[float, torch.Tensor]:
    """(microseconds a call, the last call's result), of `calls` calls in one graph, each on a copy of x of its own."""
    inputs = torch.empty(calls, *x.shape, dtype=x.dtype, device=x.device)
    for _ in range(2):
        step(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(calls):
            result = step(inputs[i])
    times = []
    for _ in range(REPLAYS):
        inputs.copy_(x.expand_as(inputs))  # a sum in place has overwritten them
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    return statistics.median(times[3:]), result.clone()


def run_rank(rank: int, size: int, port: int, args: argparse.Namespace, results: multiprocessing.Queue) -> None:
    threading.Thread(target=lambda: (time.sleep(args.timeout), os._exit(2)), daemon=True).start()
    torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    bench = Bench(rank, size, store, max(args.rows), args.hidden_size)
    with torch.inference_mode():
        for name in args.variants:
            for rows in args.rows:
                try:
                    outcome: float | str = bench.measure(name, rows)
                except Exception as error:
                    outcome = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
                results.put((rank, name, rows, outcome))
    results.close()
    results.join_thread()
    os._exit(0)  # graphs with NCCL in them are still there


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 207, 256, 512])
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--ranks", type=int, help="default: all visible GPUs")
    parser.add_argument("--timeout", type=float, default=60, help="seconds after which every rank is killed")
    parser.add_argument("--json", metavar="FILE", help="write the figures there as well")
    args = parser.parse_args()
    size = args.ranks or torch.cuda.device_count()
    if size < 2:
        sys.exit(f"needs at least 2 GPUs, {size} visible")
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    results = context.Queue()
    processes = [
        context.Process(target=run_rank, args=(rank, size, store.port, args, results), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    table: dict[str, dict[int, float]] = {name: {} for name in args.variants}
    failures: list[str] = []
    expected = size * len(args.variants) * len(args.rows)
    deadline = time.monotonic() + args.timeout + 5
    while expected and time.monotonic() < deadline:
        try:
            rank, name, rows, outcome = results.get(timeout=1)
        except queue.Empty:
            if not any(process.is_alive() for process in processes):
                break
            continue
        expected -= 1
        if isinstance(outcome, str):
            failures.append(f"rank {rank}, {name}, {rows} rows: {outcome}")
        else:
            table[name][rows] = max(outcome, table[name].get(rows, 0.0))
    for process in processes:
        process.kill()
    if expected:
        failures.append(f"{expected} figures did not come: a rank hung or died")
    print("\n".join(failures))
    print(
        f"{size} x {torch.cuda.get_device_name(0)}, [rows, {args.hidden_size}] bfloat16, us a call, the slowest rank's"
    )
    print(f"{'rows':>18} " + " ".join(f"{rows:8}" for rows in args.rows))
    print(f"{'KB':>18} " + " ".join(f"{rows * args.hidden_size * 2 / 1024:8.0f}" for rows in args.rows))
    for name, figures in table.items():
        print(f"{name:>18} " + " ".join(f"{figures[r]:8.2f}" if r in figures else f"{'-':>8}" for r in args.rows))
    if args.json:
        Path(args.json).write_text(json.dumps({"ranks": size, "microseconds": table, "failures": failures}))


if __name__ == "__main__":
    main()
