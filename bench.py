"""Offline throughput, with nano-vLLM's workload.

    python bench.py                      random weights on Qwen3-0.6B's shapes; nothing is downloaded
    python bench.py --model PATH         a real checkpoint
    python bench.py --model-shape 8b --num-seqs 1 --input-len 128 --output-len 512 --temperature 0
    python bench.py --temperature 0.6 --top-k 20 --top-p 0.95     what Qwen3 recommends
    python bench.py --model-shape 32b --tensor-parallel-size 2

The default workload: 256 prompts of 100 to 1024 random tokens, 100 to 1024 new tokens each, all queued at once. After
the timed run a few of its sequences are fed through the torch backend; a run whose logits differ does not count.
The share of the roofline says how near the run came to what the devices' memory and matrix units allow.
"""

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.scheduler import Output
from nanovllm.models.model_config import ModelConfig
from nanovllm.utils.teacher_forcing import check_logits

SHAPES = {
    "tiny": dict(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=64, vocab_size=16384, tie_word_embeddings=True,
    ),
    "0.6b": dict(
        hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=True,
    ),
    "8b": dict(
        hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ),
    "32b": dict(
        hidden_size=5120, intermediate_size=25600, num_hidden_layers=64, num_attention_heads=64, num_key_value_heads=8,
        head_dim=128, vocab_size=151936, tie_word_embeddings=False,
    ),
}  # fmt: skip
MAX_LOGITS_ERROR = 0.05  # ||ours - reference|| / ||reference|| of any position, in bfloat16
MIN_DISTINCT_IDS = 1000
Workload = tuple[list[list[int]], list[int]]  # prompts, output lengths


def write_shape(name: str, directory: str) -> str:
    """A folder with nothing but a config.json of the named shapes."""
    common = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_act="silu", rms_norm_eps=1e-6, rope_theta=1e6,
        max_position_embeddings=40960, attention_bias=False, torch_dtype="bfloat16",
    )  # fmt: skip
    (Path(directory) / "config.json").write_text(json.dumps(common | SHAPES[name]))
    return directory


def make_workload(
    seed: int,
    num_seqs: int,
    input_len: int | None,
    output_len: int | None,
    longest: int,
    vocab_size: int = 151936,
) -> Workload:
    """Random prompts and output lengths of 100 to `longest` tokens, in nano-vLLM's order of random calls.

    A given `input_len` or `output_len` replaces the random lengths.
    """
    rng = random.Random(seed)
    largest_id = min(10000, vocab_size - 1)
    shortest = min(100, longest)
    prompts = [
        [rng.randint(0, largest_id) for _ in range(input_len or rng.randint(shortest, longest))]
        for _ in range(num_seqs)
    ]
    return prompts, [output_len or rng.randint(shortest, longest) for _ in range(num_seqs)]


@dataclass
class Step:
    """One settled step of the timed run."""

    time: float  # seconds since the run began
    prefill_tokens: int
    decode_tokens: int
    num_running: int
    kv_occupancy: float  # share of the pool's blocks in use


class RecordingLLM(LLM):
    """An LLM that notes what each step did."""

    def record(self) -> None:
        """Forget earlier steps and start the clock."""
        self.steps: list[Step] = []
        self._begin = time.perf_counter()

    def _advance(self, launch: bool = True) -> tuple[list[Output], int]:
        outputs, num_tokens = super()._advance(launch)
        blocks = self.scheduler.block_manager
        used = len(blocks.used_block_ids) / len(blocks.blocks)
        prefill, decode = max(num_tokens, 0), max(-num_tokens, 0)
        now = time.perf_counter() - self._begin
        self.steps.append(Step(now, prefill, decode, len(self.scheduler.running), used))
        return outputs, num_tokens


def measure_device(device: torch.device) -> tuple[float, float]:
    """(bytes a second that a sum reads, bfloat16 FLOPs a second of a large matmul) of this device, right now."""
    numbers = torch.randn(1 << 30, device=device)
    a, b = (torch.randn(8192, 8192, device=device, dtype=torch.bfloat16) for _ in range(2))

    def seconds(step: Callable[[], object]) -> float:
        step()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(10):
            step()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e4

    return numbers.numel() * 4 / seconds(numbers.sum), 2 * 8192**3 / seconds(lambda: a @ b)


def roofline_seconds(
    config: ModelConfig, workload: Workload, num_decode_steps: int, bandwidth: float, flops: float
) -> float:
    """The least time for the workload: K/V and weights read once a decode step, prefill at the full matmul rate.

    Counts bfloat16. Prefix hits are not counted on: the prompts are random.
    """
    prompts, lengths = workload
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    kv_bytes_per_token = 2 * 2 * config.num_hidden_layers * kv_heads * dim
    # The first of n new tokens comes from the prefill, the others read a context that grows by one each time.
    contexts = sum((n - 1) * len(p) + n * (n - 1) // 2 for p, n in zip(prompts, lengths, strict=True))
    layer = config.hidden_size * dim * (2 * heads + 2 * kv_heads) + 3 * config.hidden_size * config.intermediate_size
    layers = config.num_hidden_layers * layer
    head = config.vocab_size * config.hidden_size
    decode_bytes = contexts * kv_bytes_per_token + num_decode_steps * 2 * (layers + head)
    attention = sum(2 * len(p) * (len(p) + 1) * heads * dim * config.num_hidden_layers for p in prompts)
    prefill_flops = 2 * layers * sum(map(len, prompts)) + 2 * head * len(prompts) + attention
    return decode_bytes / bandwidth + prefill_flops / flops


def plot(steps: list[Step], path: str, title: str) -> None:
    """Draw batch size, KV occupancy and tokens a second of the run over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    times = [step.time for step in steps]
    width = max(times[-1] / 60, 1e-3)
    bins = [i * width for i in range(int(times[-1] / width) + 2)]
    middles = [(a + b) / 2 for a, b in zip(bins, bins[1:], strict=False)]
    figure, (top, middle, bottom) = plt.subplots(3, 1, sharex=True, figsize=(9, 7), constrained_layout=True)
    figure.suptitle(title)
    top.step(times, [step.num_running for step in steps], where="post")
    top.set_ylabel("sequences running")
    middle.step(times, [100 * step.kv_occupancy for step in steps], where="post", color="tab:green")
    middle.set_ylabel("KV blocks in use, %")
    for name, color in (("prefill_tokens", "tab:orange"), ("decode_tokens", "tab:blue")):
        rates = [0.0] * len(middles)
        for step in steps:
            rates[min(int(step.time / width), len(rates) - 1)] += getattr(step, name) / width
        bottom.plot(middles, rates, label=name.split("_")[0], color=color)
    bottom.set_yscale("symlog", linthresh=1000)
    bottom.set_ylabel("tokens a second")
    bottom.set_xlabel("seconds")
    bottom.legend()
    for axis in (top, middle, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def run(
    llm: RecordingLLM, workload: Workload, sampling: dict[str, float], use_tqdm: bool = False
) -> tuple[float, list[list[int]]]:
    """Seconds, and the completions. `sampling`: fields of SamplingParams."""
    prompts, lengths = workload
    params = [SamplingParams(**sampling, max_tokens=n, ignore_eos=True) for n in lengths]
    llm.reset_prefix_cache()
    llm.record()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=use_tqdm)
    return time.perf_counter() - start, [output["token_ids"] for output in outputs]


def check_run(llm: LLM, workload: Workload, completions: list[list[int]], num_checked: int) -> dict[str, float]:
    """Refuse a run that computed something else than the torch backend does. Exits with 1 then."""
    prompts, lengths = workload
    assert [len(ids) for ids in completions] == lengths, "a completion has the wrong length"
    sample = list(zip(prompts, completions, strict=True))[:num_checked]
    report = check_logits(llm, sample)
    distinct = len({token_id for ids in completions for token_id in ids})
    wanted = min(MIN_DISTINCT_IDS, sum(lengths) // 4)
    if not report.max_error < MAX_LOGITS_ERROR:  # a NaN fails as well
        sys.exit(f"the run does not count: logits are {report.max_error:.3f} away from the torch backend's")
    if len(sample) > 1 and distinct <= wanted:
        sys.exit(f"the run does not count: only {distinct} distinct ids")
    return {
        "checked_positions": report.num_positions,
        "max_logits_error": report.max_error,
        "same_argmax": report.same_argmax,
        "distinct_ids": distinct,
    }


def environment(llm: LLM) -> dict[str, object]:
    device = llm.model_runner.device
    try:
        commit = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True, text=True, check=True,
        ).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        commit = None
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "triton", "transformers", "flash_attn"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or "cpu",
        "versions": versions,
        "commit": commit,
        "dtype": str(llm.model_runner.dtype).removeprefix("torch."),
        "backends": [llm.model_runner.prefill_backend.name, llm.model_runner.decode_backend.name],
        "overlap": llm.config.overlap,
        "cuda_graphs": llm.model_runner.graphs is not None,
        "tensor_parallel_size": llm.config.tensor_parallel_size,
    }


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="directory or hub id; default: random weights on --model-shape")
    parser.add_argument("--model-shape", choices=SHAPES, help="default: 0.6b on a GPU, tiny on a CPU")
    parser.add_argument("--num-seqs", type=int, help="default: 256 on a GPU, 32 on a CPU")
    parser.add_argument(
        "--input-len", type=int, help="tokens of every prompt; default: random, 100 to 1024 (128 on a CPU)"
    )
    parser.add_argument(
        "--output-len", type=int, help="new tokens of every prompt; default: random, 100 to 1024 (128 on a CPU)"
    )
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--top-k", type=int, default=0, help="0: off, the default; Qwen3's own setting is 20")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: off, the default; Qwen3's own setting is 0.95")
    parser.add_argument("--min-p", type=float, default=0.0, help="0: off, the default")
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--enforce-eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--no-overlap", action="store_true", help="settle a step before the next is launched")
    parser.add_argument("--repeats", type=int, default=1, help="timed runs; the median counts")
    parser.add_argument("--num-checked", type=int, default=8, help="sequences to check afterwards; 0: none")
    parser.add_argument("--bandwidth", type=float, help="bytes a second that a GPU reads; default: measured, GPU only")
    parser.add_argument("--flops", type=float, help="a GPU's bfloat16 matmul FLOPs a second; default: measured")
    parser.add_argument("--plot", metavar="PNG", help="draw the last run (needs matplotlib: pip install -e '.[plot]')")
    parser.add_argument("--json", action="store_true", help="print one line of JSON last")
    args = parser.parse_args()
    for name in ("repeats", "num_seqs", "input_len", "output_len"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    longest = 1024 if torch.cuda.is_available() else 128
    if (args.input_len or longest) + (args.output_len or longest) > args.max_model_len:
        parser.error(
            f"prompts of {args.input_len or longest} and completions of {args.output_len or longest} tokens do not fit "
            f"into --max-model-len {args.max_model_len}"
        )
    if args.plot and find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install -e '.[plot]'")
    return args


def main() -> None:
    args = parse_args()
    on_gpu = torch.cuda.is_available()
    # Before the engine takes the memory.
    bandwidth, flops = args.bandwidth, args.flops
    if on_gpu and not (bandwidth and flops):
        measured = measure_device(torch.device("cuda"))
        bandwidth, flops = bandwidth or measured[0], flops or measured[1]
        torch.cuda.empty_cache()
    shape = args.model_shape or ("0.6b" if on_gpu else "tiny")
    num_seqs = args.num_seqs or (256 if on_gpu else 32)
    longest = 1024 if on_gpu else 128
    if not on_gpu:
        lengths = f"{args.input_len or f'up to {longest}'} + {args.output_len or f'up to {longest}'} tokens"
        print(f"No GPU: a small workload ({num_seqs} sequences of {lengths}, {args.model or f'{shape} shapes'})")
    with tempfile.TemporaryDirectory() as directory:
        start = time.perf_counter()
        options = dict(load_format="dummy", skip_tokenizer_init=True) if args.model is None else {}
        llm = RecordingLLM(
            args.model or write_shape(shape, directory),
            max_model_len=args.max_model_len,
            tensor_parallel_size=args.tensor_parallel_size,
            attention_backend=args.attention_backend,
            enforce_eager=args.enforce_eager,
            overlap=not args.no_overlap,
            seed=0,
            **options,
        )
    print(f"Started in {time.perf_counter() - start:.1f}s")
    vocab_size = llm.config.model_config.vocab_size
    sampling = dict(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, min_p=args.min_p)
    warm_up_len = min(args.output_len or 32, 32)
    run(llm, make_workload(1, num_seqs, args.input_len, warm_up_len, longest, vocab_size), sampling)

    workload = make_workload(0, num_seqs, args.input_len, args.output_len, longest, vocab_size)
    num_tokens = sum(workload[1])
    times, completions = [], []
    for _ in range(args.repeats):
        seconds, completions = run(llm, workload, sampling, use_tqdm=sys.stderr.isatty())
        times.append(seconds)
        print(f"Total: {num_tokens}tok, Time: {seconds:.2f}s, Throughput: {num_tokens / seconds:.2f}tok/s")
    median = statistics.median(times)
    share = None
    if bandwidth and flops:
        num_decode_steps = sum(step.decode_tokens > 0 for step in llm.steps)
        ranks = args.tensor_parallel_size
        least = roofline_seconds(llm.config.model_config, workload, num_decode_steps, ranks * bandwidth, ranks * flops)
        share = least / median
        print(
            f"Roofline: {least:.2f}s at {ranks} x {bandwidth / 1e12:.2f} TB/s of reads and {flops / 1e12:.0f} TFLOP/s, "
            f"{100 * share:.1f}% of it reached"
        )
    if args.plot:
        plot(llm.steps, args.plot, f"{num_seqs} sequences, {num_tokens / median:,.0f} new tokens a second")
    checks = check_run(llm, workload, completions, args.num_checked) if args.num_checked else {}
    if checks:
        print(
            f"Checked: {checks['checked_positions']} positions of {min(args.num_checked, num_seqs)} sequences against "
            f"the torch backend, largest error of the logits {checks['max_logits_error']:.4f}"
        )
    if args.json:
        result = environment(llm) | {
            "model": args.model or f"random weights, {shape} shapes",
            "num_seqs": num_seqs,
            "sampling": sampling,
            "prompt_tokens": sum(map(len, workload[0])),
            "tokens": num_tokens,
            "seconds": round(median, 4),
            "all_seconds": [round(t, 4) for t in times],
            "tok_per_s": round(num_tokens / median, 2),
            "roofline_share": share and round(share, 4),
        }
        print(json.dumps(result | checks))


if __name__ == "__main__":
    main()
