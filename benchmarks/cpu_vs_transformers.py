"""Requested tokens per second on a CPU, next to transformers' `generate`, with the bundled model in float32.

    python benchmarks/cpu_vs_transformers.py --threads 2

32 prompts of 16 to 256 tokens ask for 16 to 128 new ones each. transformers gets them as one left-padded call of the
longest request's length, and only the requested tokens count. Each engine runs in a process of its own; best of three.
On a machine that others use as well, `--rounds 3` runs both three times in turn and takes the best of each.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
MODEL = str(ROOT / "assets" / "tiny-qwen3")
sys.path.insert(0, str(ROOT))


def workload() -> tuple[list[list[int]], list[int]]:
    rng = random.Random(0)
    prompts = [[rng.randint(5, 900) for _ in range(rng.randint(16, 256))] for _ in range(32)]
    return prompts, [rng.randint(16, 128) for _ in prompts]


def run_ours() -> list[float]:
    from nanovllm import LLM, SamplingParams

    prompts, lengths = workload()
    llm = LLM(MODEL, device="cpu", dtype="float32")
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in lengths]
    times = []
    for _ in range(4):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - start)
        assert [len(o["token_ids"]) for o in outputs] == lengths
    return times[1:]


def run_transformers() -> list[float]:
    import torch
    from transformers import AutoModelForCausalLM

    prompts, lengths = workload()
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    times = []
    for _ in range(4):
        start = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=max(lengths), min_new_tokens=max(lengths),
                pad_token_id=0,
            )  # fmt: skip
        times.append(time.perf_counter() - start)
        assert out.shape[1] == longest + max(lengths)
    return times[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--engine", choices=("ours", "transformers"), help="run one, in this process")
    args = parser.parse_args()
    if args.engine:
        import torch

        torch.set_num_threads(args.threads)
        print(json.dumps({"ours": run_ours, "transformers": run_transformers}[args.engine]()))
        return
    requested = sum(workload()[1])
    rates = {"ours": 0.0, "transformers": 0.0}
    for engine in [*rates] * args.rounds:
        command = [sys.executable, __file__, "--engine", engine, "--threads", str(args.threads)]
        env = os.environ | {"OMP_NUM_THREADS": str(args.threads)}
        output = subprocess.run(command, capture_output=True, text=True, check=True, env=env).stdout
        times = json.loads(output.splitlines()[-1])
        rate = requested / min(times)
        rates[engine] = max(rates[engine], rate)
        print(f"{engine}: {requested} tokens, best of {[round(t, 2) for t in times]} s, {rate:.0f} tok/s")
    print(f"ratio: {rates['ours'] / rates['transformers']:.2f}")


if __name__ == "__main__":
    main()
