"""Two ranks under random load for minutes: nothing may pile up, on either of them."""

import gc
import os
import random

import pytest

from nanovllm import SamplingParams
from tests.recording import assert_idle, engine
from tests.tensor_parallel.processes import num_open_files, resident_bytes, workers_of

pytestmark = pytest.mark.processes

NUM_REQUESTS = 2000
WARM_UP = 400  # requests until allocators and caches have what they keep


@pytest.mark.slow
def test_two_thousand_requests_of_random_length_with_aborts(tiny_model):
    rng = random.Random(0)
    path = tiny_model(std=0.3)
    with engine(path, tensor_parallel_size=2, kvcache_block_size=16, num_kvcache_blocks=40, max_num_seqs=16) as (
        llm,
        log,
    ):
        (worker,) = workers_of(os.getpid())
        scheduler = llm.scheduler
        queued = aborted = ended = 0
        before: dict[str, int] = {}
        while queued < NUM_REQUESTS or not llm.is_finished():
            while queued < NUM_REQUESTS and len(scheduler.waiting) < 8:
                # Few different ids, and now and then a common beginning, for prefix hits.
                prompt = [1] * rng.choice([0, 0, 64]) + [rng.randrange(512) for _ in range(rng.randint(1, 150))]
                temperature = rng.choice([0.0, 1.0])
                params = SamplingParams(temperature=temperature, max_tokens=rng.randint(1, 40), ignore_eos=True)
                llm.add_request(prompt, params)
                queued += 1
            if rng.random() < 0.15:
                candidates = [*scheduler.running, *scheduler.waiting]
                if candidates:
                    scheduler.finish(rng.choice(candidates), "abort")
                    aborted += 1
            ended += len(llm.step()[0])
            log.clear()
            if not before and queued >= WARM_UP:
                gc.collect()
                before = usage(worker)
        assert ended + aborted == NUM_REQUESTS and aborted > NUM_REQUESTS // 20
        assert scheduler.num_preemptions > 10
        assert_idle(llm)
        gc.collect()
        after = usage(worker)
    print(f"{aborted} aborted, {scheduler.num_preemptions} preemptions; before {before}, after {after}")
    for name in ("own files", "worker's files"):
        assert after[name] <= before[name], (before, after)
    for name in ("own memory", "worker's memory"):
        assert after[name] - before[name] < 30 << 20, (before, after)


def usage(worker: int) -> dict[str, int]:
    return {
        "own files": num_open_files(),
        "worker's files": num_open_files(worker),
        "own memory": resident_bytes(),
        "worker's memory": resident_bytes(worker),
    }
