"""How long the GPU idles between the decode steps of a running engine, from a profiler trace of its kernels.

python benchmarks/step_gap.py --batch 256 --steps 60
"""

import argparse
import random
import statistics
import sys
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench import SHAPES, write_shape
from nanovllm import LLM, SamplingParams


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", choices=SHAPES, default="0.6b")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--no-overlap", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        llm = LLM(
            write_shape(args.model_shape, directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            overlap=not args.no_overlap,
        )
    rng = random.Random(0)
    for _ in range(args.batch):
        prompt = [rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))]
        llm.add_request(prompt, SamplingParams(temperature=0.6, max_tokens=None, ignore_eos=True))
    while llm.step()[1] >= 0:  # prefill
        pass
    for _ in range(20):
        llm.step()
    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        for _ in range(args.steps):
            llm.step()
        torch.cuda.synchronize()
    spans = sorted(
        (e.time_range.start, e.time_range.end, e.name)
        for e in prof.events()
        if e.device_type == torch.autograd.DeviceType.CUDA and "Memcpy" not in e.name and "Memset" not in e.name
    )
    gaps, busy, reached = [], 0.0, spans[0][0]
    for start, end, name in spans:
        if "_prepare_decode" in name:
            gaps.append(max(start - reached, 0.0))
        busy += max(end - max(start, reached), 0.0)
        reached = max(reached, end)
    total = reached - spans[0][0]
    step = total / len(gaps)
    print(
        f"batch {args.batch}, overlap {not args.no_overlap}: step {step:.0f} us, idle before a step "
        f"{statistics.median(gaps[1:]):.1f} us (median, {100 * statistics.median(gaps[1:]) / step:.2f} % of the step; "
        f"mean {statistics.mean(gaps[1:]):.1f}), busy {100 * busy / total:.1f} % of the time"
    )


if __name__ == "__main__":
    main()
