"""Tensor parallelism on all GPUs of a machine: throughput, single stream, and the share of all-reduce in a decode step.

    python benchmarks/tensor_parallel.py
    python benchmarks/tensor_parallel.py --shapes 8b --ranks 1 2 --repeats 3 --json out.json

Random weights on the named shapes. "bench" is `bench.py`'s workload (256 prompts, temperature 0.6), "single" one prompt
of 128 tokens and 512 new ones at temperature 0. A decode step is a replay of its CUDA graph, collectives included: its
time comes from events, the share of all-reduce in it from torch's profiler on rank 0 and so includes the wait for the
slower rank. Each engine has a process of its own, so that one that fails does not lose the others.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import SHAPES, RecordingLLM, environment, make_workload, run, write_shape
from benchmarks.profile_step import fill
from nanovllm.engine.model_runner import ModelRunner

STEPS = ((1, 384), (207, 800))  # sequences, mean context: as in the single stream, and on average in the bench
REPLAYS = 20
COMMUNICATION = ("nccl", "all_reduce")  # in the names of kernels


@torch.inference_mode()
def replay(runner: ModelRunner, num_seqs: int, context: int) -> dict[str, object]:
    """Time decode steps; to be called on every rank."""
    rows, positions = fill(runner, num_seqs, context, temperature=0.6)

    def steps() -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(REPLAYS):
            runner.graphs.replay(rows, positions)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1000 / REPLAYS

    steps()
    step_us = steps()
    kernels: dict[str, list[float]] = defaultdict(list)
    if runner.group.rank == 0:
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            steps()
        for event in profiler.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                kernels[event.name].append(event.device_time)
    else:
        steps()
    busy = {name: sum(times) / REPLAYS for name, times in kernels.items()}
    communication = {name: us for name, us in busy.items() if any(part in name.lower() for part in COMMUNICATION)}
    top = sorted(busy.items(), key=lambda item: -item[1])[:16]
    return {
        "step_us": step_us,
        "kernels_us": sum(busy.values()),
        "communication_us": sum(communication.values()),
        "communication": {name[:80]: [us, len(kernels[name]) / REPLAYS] for name, us in communication.items()},
        "kernels": {name[:80]: [us, len(kernels[name]) / REPLAYS] for name, us in top},
    }


def measure(shape: str, ranks: int, args: argparse.Namespace) -> dict[str, object]:
    """All that one engine has to tell."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as directory:
        llm = RecordingLLM(
            write_shape(shape, directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            tensor_parallel_size=ranks,
            enforce_eager=args.enforce_eager,
            seed=0,
        )
    result: dict[str, object] = environment(llm) | {"shape": shape, "start_s": time.perf_counter() - start}
    inboxes = llm.model_runner.group._inboxes
    result["peer_memory_rows"] = inboxes.max_rows if inboxes is not None else 0
    with llm:
        cases = {"bench": (256, None, None, 0.6), "single": (1, 128, 512, 0.0)}
        for name in args.cases:
            num_seqs, input_len, output_len, temperature = cases[name]
            sampling = {"temperature": temperature}
            warm_up_len = 32 if name == "bench" else 128
            run(llm, make_workload(1, num_seqs, input_len, warm_up_len, 1024), sampling)
            workload = make_workload(0, num_seqs, input_len, output_len, 1024)
            seconds = [run(llm, workload, sampling)[0] for _ in range(args.repeats)]
            num_tokens = sum(workload[1])
            result[name] = {
                "tok_per_s": num_tokens / statistics.median(seconds),
                "seconds": seconds,
            }
            print(f"{shape}, {ranks} ranks, {name}: {result[name]['tok_per_s']:.1f} tok/s {seconds}", flush=True)
        if not args.enforce_eager:
            for num_seqs, context in STEPS:
                if llm._workers is not None:
                    llm._workers.call("apply", replay, num_seqs, context)
                result[f"step_{num_seqs}"] = replay(llm.model_runner, num_seqs, context)
    return result


def one_engine(shape: str, ranks: int, args: argparse.Namespace) -> dict[str, object]:
    """`measure` in a process of its own, with a limit on its time."""
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "result.json"
        command = [sys.executable, __file__, "--one", shape, str(ranks), str(out), "--repeats", str(args.repeats)]
        command += ["--cases", *args.cases] + ["--enforce-eager"] * args.enforce_eager
        try:
            code = subprocess.run(command, timeout=args.timeout).returncode
        except subprocess.TimeoutExpired:
            code = f"none within {args.timeout:g} s"
        if out.exists():
            return json.loads(out.read_text())
        return {"shape": shape, "tensor_parallel_size": ranks, "failure": f"exit code {code}"}


def table(results: list[dict]) -> str:
    """One line an engine."""
    lines = ["shape  ranks  bench tok/s  single tok/s  start s"]
    lines[0] += "".join(f"  step({n}) us  all-reduce" for n, _ in STEPS)
    for result in results:
        line = f"{result['shape']:>5}  {result['tensor_parallel_size']:5}"
        if "failure" in result:
            lines.append(f"{line}  {result['failure']}")
            continue
        for name, width in (("bench", 11), ("single", 12)):
            line += f"  {result[name]['tok_per_s']:{width}.1f}" if name in result else f"  {'-':>{width}}"
        line += f"  {result['start_s']:7.1f}"
        for num_seqs, _ in STEPS:
            step = result.get(f"step_{num_seqs}")
            width = len(f"step({num_seqs}) us")
            if step is not None:
                line += f"  {step['step_us']:{width}.0f}  {100 * step['communication_us'] / step['step_us']:8.1f} %"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["0.6b", "8b", "32b"])
    parser.add_argument("--ranks", type=int, nargs="+", help="default: 1, 2 and 4, as far as there are GPUs")
    parser.add_argument("--cases", nargs="+", choices=["bench", "single"], default=["bench", "single"])
    parser.add_argument("--repeats", type=int, default=1, help="timed runs of each case; the median counts")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for one engine")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    parser.add_argument("--one", nargs=3, metavar=("SHAPE", "RANKS", "FILE"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        shape, ranks, out = args.one
        Path(out).write_text(json.dumps(measure(shape, int(ranks), args)))
        return
    num_gpus = torch.cuda.device_count()
    if num_gpus == 0:
        sys.exit("needs GPUs, none is visible")
    results = []
    for shape in args.shapes:
        for ranks in args.ranks or [n for n in (1, 2, 4) if n <= num_gpus]:
            results.append(one_engine(shape, ranks, args))
            if args.json:
                Path(args.json).write_text(json.dumps(results))
    print(table(results))


if __name__ == "__main__":
    main()
