"""Where one decode step spends its time: every kernel of a CUDA-graph replay, next to the bytes it has to move.

    python benchmarks/profile_step.py --batch 207 --context 800
    python benchmarks/profile_step.py --batch 1 --context 384 --model-shape 0.6b

Random weights and random cached keys; lengths are spread evenly from half to one and a half times --context.
"""

import argparse
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import SHAPES, write_shape
from nanovllm import LLM
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Batch


def fill(runner: ModelRunner, batch: int, context: int, temperature: float) -> tuple[list[int], list[int]]:
    """Give `batch` rows blocks full of random keys and values; returns rows and the positions to decode."""
    lengths = [max(1, context // 2 + context * i // max(batch - 1, 1)) if batch > 1 else context for i in range(batch)]
    update, first = Batch(is_prefill=False), 0
    for row, length in enumerate(lengths):
        num_blocks = length // runner.block_size + 1
        update.new_rows.append((row, temperature, row))
        update.new_blocks.append((row, 0, list(range(first, first + num_blocks))))
        first += num_blocks
    runner.tables.update(update)
    runner.kv_cache[:, :, :first].normal_()
    return list(range(batch)), lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--batch", type=int, default=207)
    parser.add_argument("--context", type=int, default=800)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, torch.inference_mode():
        llm = LLM(
            write_shape(args.model_shape, directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_num_seqs=max(args.batch, 1),
            attention_backend=args.attention_backend,
        )
        runner = llm.model_runner
        rows, positions = fill(runner, args.batch, args.context, args.temperature)
        for _ in range(5):
            runner.graphs.replay(rows, positions)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(args.steps):
            runner.graphs.replay(rows, positions)
        end.record()
        torch.cuda.synchronize()
        step_us = start.elapsed_time(end) * 1000 / args.steps
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            for _ in range(args.steps):
                runner.graphs.replay(rows, positions)
            torch.cuda.synchronize()
    kernels: dict[str, list[float]] = defaultdict(list)
    for event in prof.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels[event.name].append(event.device_time)
    busy = sum(map(sum, kernels.values())) / args.steps
    layer = runner.attention_layers[0]
    kv_bytes = (
        2 * 2 * sum(p + 1 for p in positions) * layer.num_kv_heads * layer.head_dim * len(runner.attention_layers)
    )
    weight_bytes = sum(p.numel() * p.element_size() for p in runner.model.parameters())
    print(f"{args.model_shape}, batch {args.batch}, mean context {sum(positions) / len(positions):.0f}")
    print(f"step {step_us:.1f} us (events around replays), kernels {busy:.1f} us (profiler)")
    print(f"bytes a step: K/V {kv_bytes / 1e6:.1f} MB, weights {weight_bytes / 1e6:.1f} MB (a tied head counted once)")
    print(f"{'us/step':>9} {'calls':>6} {'us/call':>8}  kernel")
    for name, times in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:28]:
        calls = len(times) / args.steps
        print(f"{sum(times) / args.steps:9.1f} {calls:6.1f} {sum(times) / len(times):8.2f}  {name[:100]}")


if __name__ == "__main__":
    main()
