"""Seconds from starting a Python process to its first token: with empty kernel caches, and again with filled ones.

    python benchmarks/cold_start.py
    python benchmarks/cold_start.py --model-shape 8b

Everything counts that a user waits for: the imports, the weights (random here), kernels, graphs, the first step.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent

CHILD = """
import logging, sys, time
begin = float(sys.argv[2])
import torch
from nanovllm import LLM, SamplingParams
imported = time.time()
logging.basicConfig(format="%(message)s")
logging.getLogger("nanovllm").setLevel(logging.INFO)
llm = LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True)
started = time.time()
llm.generate([list(range(128))], SamplingParams(max_tokens=1, ignore_eos=True), use_tqdm=False)
print(f"imports {imported - begin:.1f} s, start {started - imported:.1f} s", end=", ")
print(f"first token after {time.time() - begin:.1f} s")
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-shape", default="0.6b")
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    from bench import write_shape

    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory() as caches:
        write_shape(args.model_shape, directory)
        env = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TRITON_CACHE_DIR": os.path.join(caches, "triton"),
            "TORCHINDUCTOR_CACHE_DIR": os.path.join(caches, "inductor"),
            "CUDA_CACHE_PATH": os.path.join(caches, "cuda"),
        }
        for name in ("empty caches", "filled caches"):
            print(f"{name}:", flush=True)
            subprocess.run([sys.executable, "-c", CHILD, directory, str(time.time())], env=env, check=True)


if __name__ == "__main__":
    main()
