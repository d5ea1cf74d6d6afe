"""What each part of the engine brings: `bench.py`'s throughput and single stream, with one part at a time left out.

    python benchmarks/ablations.py
    python benchmarks/ablations.py --cases single --variants "no graphs" "no PDL"

Each engine has a process of its own. A fusion is left out by putting the separate operations in its place, so what is
left is what the plain layers would do on a GPU.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import SHAPES, RecordingLLM, make_workload, run, write_shape
from nanovllm.backends.triton_backend import TritonBackend
from nanovllm.layers import fused, linear
from nanovllm.layers.activation import SiluAndMul
from nanovllm.layers.layernorm import RMSNorm
from nanovllm.layers.sampler import Sampler
from nanovllm.models import qwen3


def no_few_rows() -> None:
    linear.few_rows_kernel = fused.few_rows_kernel = lambda x, weight: None


def no_fused_decode() -> None:
    TritonBackend.fuses_decode = False


def no_add_in_norm() -> None:
    plain = RMSNorm.forward

    def forward(self: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> object:
        if residual is None:
            return plain(self, x)
        residual = x + residual
        return plain(self, residual), residual

    RMSNorm.forward = forward


def no_silu_mul() -> None:
    def forward(self: SiluAndMul, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    SiluAndMul.forward = forward
    qwen3.gated_linear = lambda linear, act_fn, x: act_fn(linear(x))


def plain_sampler() -> None:
    Sampler.forward = lambda self, logits, temperatures, seeds, positions, all_greedy=False: (
        logits.argmax(dim=-1) if all_greedy else Sampler.sample(logits, temperatures, seeds, positions)
    )


Variant = tuple[dict[str, object], dict[str, str], Callable[[], None] | None]
VARIANTS: dict[str, Variant] = {  # arguments of the engine, environment, what is replaced
    "all of it": ({}, {}, None),
    "no overlap": ({"overlap": False}, {}, None),
    "no graphs": ({"enforce_eager": True}, {}, None),
    "no PDL": ({}, {"NANOVLLM_NO_PDL": "1"}, None),
    "flash_attn": ({"attention_backend": "flash_attn"}, {}, None),
    "norm, RoPE, store outside of attention": ({}, {}, no_fused_decode),
    "residual outside of the norm": ({}, {}, no_add_in_norm),
    "SiLU and product apart": ({}, {}, no_silu_mul),
    "plain sampler": ({}, {}, plain_sampler),
    "cuBLAS for few rows": ({}, {}, no_few_rows),
}
CASES = {"bench": (256, None, None, 0.6), "single": (1, 128, 512, 0.0), "16": (16, 512, 512, 0.0)}


def measure(name: str, args: argparse.Namespace) -> dict[str, float]:
    options, _, patch = VARIANTS[name]
    if patch is not None:
        patch()
    with tempfile.TemporaryDirectory() as directory:
        llm = RecordingLLM(
            write_shape(args.model_shape, directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=4096,
            seed=0,
            **options,
        )
    rates = {}
    for case in args.cases:
        num_seqs, input_len, output_len, temperature = CASES[case]
        sampling = {"temperature": temperature}
        run(llm, make_workload(1, num_seqs, input_len, 32, 1024), sampling)
        workload = make_workload(0, num_seqs, input_len, output_len, 1024)
        seconds = [run(llm, workload, sampling)[0] for _ in range(args.repeats)]
        rates[case] = sum(workload[1]) / statistics.median(seconds)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["bench", "single"])
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="NAME", help="; ".join(VARIANTS)
    )
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.one, args)))
        return
    if not torch.cuda.is_available() and args.model_shape != "tiny":
        sys.exit(f"{args.model_shape} needs a GPU, and there is none; --model-shape tiny runs on a CPU")
    for name in args.variants:
        command = [sys.executable, __file__, "--one", name, "--model-shape", args.model_shape]
        command += ["--repeats", str(args.repeats), "--cases", *args.cases]
        environment = os.environ | VARIANTS[name][1]
        result = subprocess.run(command, env=environment, capture_output=True, text=True)
        if result.returncode:
            print(f"{name:40} failed: {result.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        rates = json.loads(result.stdout.splitlines()[-1])
        print(f"{name:40}" + "".join(f"  {case} {rate:9.1f} tok/s" for case, rate in rates.items()), flush=True)


if __name__ == "__main__":
    main()
