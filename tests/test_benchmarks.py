"""The scripts in benchmarks/ still fit the engine: they are run by hand and on machines that others do not have."""

import importlib
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = sorted(path.name for path in (ROOT / "benchmarks").glob("*.py"))

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python benchmarks/x.py` finds its neighbours, with an eighth of the work."""
    monkeypatch.syspath_prepend(str(ROOT))
    bench = importlib.import_module("bench")
    make_workload = bench.make_workload

    def shorter(seed: int, num_seqs: int, input_len: int, output_len: int, longest: int) -> object:
        return make_workload(seed, num_seqs, input_len // 8, output_len // 8, longest // 8, vocab_size=1024)

    monkeypatch.setattr(bench, "make_workload", shorter)
    for name in ("ablations", "tensor_parallel"):
        monkeypatch.setattr(importlib.import_module(f"benchmarks.{name}"), "make_workload", shorter)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help(script: str) -> None:
    if script in ("bench_all_reduce.py", "bench_kernels.py", "bench_sampling.py"):
        pytest.importorskip("triton", reason="measures kernels")
    result = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / script), "--help"], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert "usage:" in result.stdout


def test_tensor_parallel_measures() -> None:
    module = importlib.import_module("benchmarks.tensor_parallel")
    result = module.measure("tiny", 1, Namespace(cases=["single"], repeats=1, enforce_eager=True))
    assert result["shape"] == "tiny"
    assert result["single"]["tok_per_s"] > 0
    assert f"{result['single']['tok_per_s']:.1f}" in module.table([result])


def test_ablations_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("benchmarks.ablations")
    for owner, name in (
        (module.RMSNorm, "forward"),
        (module.SiluAndMul, "forward"),
        (module.Sampler, "forward"),
        (module.TritonBackend, "fuses_decode"),
        (module.linear, "few_rows_kernel"),
        (module.fused, "few_rows_kernel"),
        (module.qwen3, "gated_linear"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back after what the variants replace
    for name, (options, _, _) in module.VARIANTS.items():
        if "attention_backend" not in options:
            rates = module.measure(name, Namespace(model_shape="tiny", cases=["single"], repeats=1))
            assert rates["single"] > 0, name
