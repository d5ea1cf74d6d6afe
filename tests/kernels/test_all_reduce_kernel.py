"""The one-shot all-reduce: ranks are processes that share memory, with the kernel in Triton's interpreter.

On GPUs tests/gpu/test_tensor_parallel.py runs it over real peer memory.
"""

import multiprocessing
from multiprocessing.connection import Connection
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")

MAX_ROWS, EPS = 5, 1e-6
NUM_ROWS = [5, 1, 3, 5, 2, 5, 1, 1, 4]  # of calls that follow each other: rows come and go


def part(rank: int, call: int, num_rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """This rank's operand of a call; every fourth call has what an empty inbox holds in it."""
    generator = torch.Generator().manual_seed(100 * call + rank)
    x = torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    if call % 4 == 1:
        x.view(torch.int16 if dtype.itemsize == 2 else torch.int32)[:, ::3] = -1
        x[:, 1::3] = -0.0
    return x


def run_rank(rank: int, size: int, hidden_size: int, dtype: torch.dtype, names: list[str], answers: Connection) -> None:
    import os

    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    from nanovllm.kernels.all_reduce import Inboxes, all_reduce, all_reduce_add_rms_norm

    segments = [SharedMemory(name) for name in names]
    views = [torch.frombuffer(segment.buf, dtype=torch.uint8) for segment in segments]
    addresses = torch.tensor([view.data_ptr() for view in views])
    inboxes = Inboxes(rank, addresses, MAX_ROWS, hidden_size, dtype, stop=torch.zeros(1, dtype=torch.int32))
    sums, norms = [], []
    for call, num_rows in enumerate(NUM_ROWS):
        x = part(rank, call, num_rows, hidden_size, dtype)
        sums.append(all_reduce(x, inboxes).clone())
        assert sums[-1].data_ptr() != x.data_ptr()
        residual, weight = part(9, call, num_rows, hidden_size, dtype), part(10, call, 1, hidden_size, dtype)[0]
        x = part(rank, call, num_rows, hidden_size, dtype)
        norms.append(all_reduce_add_rms_norm(x, residual, weight, EPS, inboxes))
    answers.send([t.view(torch.uint8).numpy() for t in sums] + [t.view(torch.uint8).numpy() for n in norms for t in n])
    os._exit(0)


@pytest.mark.parametrize(
    ("size", "hidden_size", "dtype"),
    [
        pytest.param(2, 64, torch.float16, id="fp16-2"),
        pytest.param(3, 50, torch.float32, id="fp32-3", marks=pytest.mark.slow),
    ],
)
def test_all_ranks_get_the_sum_in_the_order_of_the_ranks(size: int, hidden_size: int, dtype: torch.dtype) -> None:
    from nanovllm.kernels.all_reduce import inbox_bytes
    from nanovllm.kernels.rms_norm import add_rms_norm

    context = multiprocessing.get_context("spawn")
    num_bytes = inbox_bytes(size, MAX_ROWS, hidden_size, dtype)
    segments = [SharedMemory(create=True, size=num_bytes) for _ in range(size)]
    names = [segment.name for segment in segments]
    try:
        for segment in segments:
            segment.buf[:] = b"\xff" * len(segment.buf)
        pipes, processes = [], []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, size, hidden_size, dtype, names, theirs)
            processes.append(context.Process(target=run_rank, args=arguments, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(ours)
        answers = []
        for pipe in pipes:
            assert pipe.poll(120), "a rank hangs"
            answers.append([torch.from_numpy(array.copy()).view(dtype) for array in pipe.recv()])
    finally:
        for process in processes:
            process.kill()
        for segment in segments:
            segment.close()
            segment.unlink()

    for call, num_rows in enumerate(NUM_ROWS):
        parts = [part(rank, call, num_rows, hidden_size, dtype) for rank in range(size)]
        total = torch.zeros(num_rows, hidden_size)
        for x in parts:
            total += x.float()
        total = total.to(dtype)
        residual, weight = part(9, call, num_rows, hidden_size, dtype), part(10, call, 1, hidden_size, dtype)[0]
        expected = [total, *add_rms_norm(total, residual, weight, EPS)]
        for answer in answers:
            actual = [answer[call], *answer[len(NUM_ROWS) + 2 * call : len(NUM_ROWS) + 2 * call + 2]]
            for a, b, first in zip(
                actual, expected, [answers[0][call], *answers[0][len(NUM_ROWS) + 2 * call :]], strict=False
            ):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
                assert torch.equal(a.isnan(), first.isnan())


def test_a_stop_ends_the_wait_for_a_rank_that_never_sends() -> None:
    from nanovllm.kernels.all_reduce import Inboxes, all_reduce, inbox_bytes

    memory = [torch.full((inbox_bytes(2, 1, 16, torch.float32),), 0xFF, dtype=torch.uint8) for _ in range(2)]
    addresses = torch.tensor([m.data_ptr() for m in memory])
    inboxes = Inboxes(0, addresses, 1, 16, torch.float32, stop=torch.ones(1, dtype=torch.int32))
    all_reduce(torch.ones(1, 16), inboxes)  # which has to return
    assert inboxes.calls.tolist() == [1]
