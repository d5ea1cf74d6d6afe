"""How engines of several ranks start, fail and end: no error is lost, nobody waits, nothing is left."""

import gc
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import types
from datetime import timedelta

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine import workers
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.workers import WorkerError
from tests.recording import greedy
from tests.reference import random_prompt
from tests.tensor_parallel import faults
from tests.tensor_parallel.faults import Fault
from tests.tensor_parallel.processes import (
    descendants,
    finish,
    is_alive,
    num_open_files,
    shared_memory,
    start_script,
    wait_until,
    workers_of,
)

pytestmark = pytest.mark.processes

SETTINGS = {"device": "cpu", "skip_tokenizer_init": True, "num_kvcache_blocks": 16, "tensor_parallel_size": 2}
PROMPTS = [random_prompt(20), random_prompt(33)]


@pytest.fixture(scope="module")
def path(tiny_model):
    return tiny_model(std=0.3)


@pytest.fixture(autouse=True)
def nothing_left():
    """No test here may leave a process, a name in /dev/shm, or a changed number of threads."""
    names, threads = shared_memory(), torch.get_num_threads()
    yield
    gc.collect()
    assert wait_until(lambda: not workers_of(os.getpid()), 10)
    assert wait_until(lambda: shared_memory() <= names, 10), shared_memory() - names
    assert torch.get_num_threads() == threads
    assert not [thread for thread in threading.enumerate() if thread.name == "nanovllm-watcher"]


@pytest.fixture(scope="module")
def expected(path):
    with LLM(path, **SETTINGS | {"tensor_parallel_size": 1}) as llm:
        return greedy(llm, PROMPTS, 12)


# Faults in a worker.


def fail(path: str, monkeypatch: pytest.MonkeyPatch, fault: Fault, ranks: int = 2) -> tuple[BaseException, float]:
    """Run an engine into the fault; returns the error that comes of it and how long that took."""
    monkeypatch.setattr(workers, "STOPPED_S", 2.0)
    faults.strike(monkeypatch, fault)
    llm = None
    with pytest.raises((RuntimeError, OSError)) as caught:
        start = time.monotonic()
        llm = LLM(path, **SETTINGS | {"tensor_parallel_size": ranks})
        start = time.monotonic()
        greedy(llm, PROMPTS, 12)
    seconds = time.monotonic() - start
    assert not workers_of(os.getpid())
    if llm is not None:
        with pytest.raises(RuntimeError, match="has exited"):
            greedy(llm, PROMPTS, 1)
        llm.exit()
    return caught.value, seconds


SLOW = pytest.mark.slow
PLACES = ("attach", "connect", "weights", "pool", "prefill", "decode", "collective")
QUICK = [("decode", "raise"), ("connect", "kill")]


@pytest.mark.parametrize(
    ("when", "kind"),
    [pytest.param(when, kind, marks=[] if (when, kind) in QUICK else SLOW) for when in PLACES for kind in faults.KINDS],
)
def test_a_fault_in_a_worker_reaches_the_caller(path, monkeypatch, when, kind):
    error, seconds = fail(path, monkeypatch, Fault(1, when, kind))
    assert isinstance(error, WorkerError)
    if kind == "raise":
        assert "rank 1 failed:" in str(error) and f"RuntimeError: struck in {when}" in str(error)
        assert "Traceback" in str(error) and "faults.py" in str(error)
    elif kind == "kill":
        assert "rank 1 died without a word, exit code -9" in str(error)
    else:
        assert "rank 1 has been stopped" in str(error)
    at_start = when in ("attach", "connect", "weights", "pool")
    assert seconds < (40 if at_start else 10)  # a start takes its time to get there, on a busy machine most of all


def test_a_rank_that_hangs_makes_the_others_time_out(path, monkeypatch):
    """Its process runs, so that only the collective can tell, or the channel."""
    monkeypatch.setattr(workers, "COLLECTIVE_TIMEOUT", timedelta(seconds=4))
    error, seconds = fail(path, monkeypatch, Fault(1, "collective", "hang"))
    assert re.search("(?i)time.?out|timed out|not answered", str(error)), error
    assert seconds < 10


def test_a_step_that_does_not_end_is_given_up(path, monkeypatch):
    """What a GPU's kernels wait for has no timeout of its own."""
    monkeypatch.setattr(workers, "step_timeout_s", lambda config: 3.0)
    error, seconds = fail(path, monkeypatch, Fault(1, "decode", "hang"))
    assert isinstance(error, WorkerError) and "a step has not ended for 3 s" in str(error)
    assert seconds < 10


@pytest.mark.slow
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("when", ["weights", "collective"])
@pytest.mark.parametrize("kind", ["raise", "kill"])
def test_of_four_ranks_the_one_that_failed_first_is_named(path, monkeypatch, rank, when, kind):
    error, _ = fail(path, monkeypatch, Fault(rank, when, kind), ranks=4)
    assert isinstance(error, WorkerError)
    assert str(error).startswith(f"rank {rank} ")


@pytest.mark.slow
@pytest.mark.parametrize("kind", faults.KINDS)
def test_a_fault_at_exit_does_not_hold_it_up(path, monkeypatch, expected, kind):
    faults.strike(monkeypatch, Fault(1, "exit", kind))
    llm = LLM(path, **SETTINGS)
    assert greedy(llm, PROMPTS, 12) == expected
    start = time.monotonic()
    llm.exit()
    assert time.monotonic() - start < 10


def test_a_worker_that_dies_while_idle_is_reported_by_the_next_call(path):
    llm = LLM(path, **SETTINGS)
    (pid,) = workers_of(os.getpid())
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid), 5)
    start = time.monotonic()
    with pytest.raises(WorkerError, match="rank 1 died without a word, exit code -9"):
        greedy(llm, PROMPTS, 2)
    assert time.monotonic() - start < 10
    llm.exit()


@pytest.mark.parametrize("place", ["_load_model", pytest.param("_bind_cache", marks=SLOW)])
def test_a_failure_of_rank_0_at_start_ends_the_others(path, monkeypatch, place):
    monkeypatch.setattr(ModelRunner, place, lambda *_: (_ for _ in ()).throw(RuntimeError("rank 0 is out of luck")))
    with pytest.raises(RuntimeError, match="rank 0 is out of luck") as caught:
        LLM(path, **SETTINGS)
    assert not isinstance(caught.value, WorkerError) and not workers_of(os.getpid())


def test_a_failure_of_rank_0_in_a_step_ends_the_others(path, monkeypatch):
    llm = LLM(path, **SETTINGS)
    monkeypatch.setattr(ModelRunner, "launch", lambda *_: (_ for _ in ()).throw(KeyError("of rank 0")))
    start = time.monotonic()
    with pytest.raises(KeyError, match="of rank 0"):
        greedy(llm, PROMPTS, 2)
    assert not workers_of(os.getpid()) and time.monotonic() - start < 10
    llm.exit()


# Mistakes of the user.


def test_pitfall_49_what_does_not_divide_is_refused_before_any_process_starts(tiny_model, monkeypatch):
    monkeypatch.setattr(workers.Workers, "__init__", lambda *_: pytest.fail("processes were about to start"))
    three = tiny_model(std=0.3, num_attention_heads=6, num_key_value_heads=3, head_dim=16)
    odd = tiny_model(std=0.3, intermediate_size=99)
    for model, ranks, numbers in [
        (three, 4, "num_attention_heads=6 .* tensor_parallel_size=4"),
        (three, 2, "tensor_parallel_size=2 .* num_key_value_heads=3"),
        (odd, 2, "intermediate_size=99 .* tensor_parallel_size=2"),
    ]:
        with pytest.raises(ValueError, match=numbers):
            LLM(model, **SETTINGS | {"tensor_parallel_size": ranks})


UNGUARDED = """
import sys
from nanovllm import LLM
LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=4, tensor_parallel_size=2)
"""


def test_pitfall_47_a_script_without_the_guard_is_told_to_add_it(path, tmp_path):
    code, _, err = finish(start_script(tmp_path, UNGUARDED, path))
    assert code == 1
    last = err.strip().splitlines()[-1]
    assert "WorkerError: rank 1 died without a word, exit code 1" in last
    assert "if __name__ == '__main__':" in last
    assert "resource_tracker" not in err


def test_a_script_that_is_no_file_is_told_to_become_one(path, monkeypatch):
    """As in `python - < script`, which the other ranks could not import."""
    main = types.ModuleType("__main__")
    main.__file__ = "<stdin>"
    monkeypatch.setitem(sys.modules, "__main__", main)
    with pytest.raises(RuntimeError, match="<stdin> is no file; save the script"):
        LLM(path, **SETTINGS)


def test_a_daemonic_process_is_told_that_it_cannot(path, monkeypatch):
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="daemon=False"):
        LLM(path, **SETTINGS)


# Ends.


def test_pitfall_48_again_and_again_in_one_process(path, expected):
    """del and gc, exit() twice, `with`, two at a time with calls interleaved; no file stays open."""
    llm = LLM(path, **SETTINGS)
    (first,) = workers_of(os.getpid())
    assert greedy(llm, PROMPTS, 12) == expected
    del llm
    gc.collect()
    assert wait_until(lambda: not is_alive(first), 10)

    files = num_open_files()
    with LLM(path, **SETTINGS) as llm, LLM(path, **SETTINGS) as other:
        assert len(workers_of(os.getpid())) == 2
        params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
        for engine in (llm, other):
            for prompt in PROMPTS:
                engine.add_request(prompt, params)
        finished: tuple[list, list] = ([], [])
        while not (llm.is_finished() and other.is_finished()):
            for engine, done in zip((llm, other), finished, strict=True):
                done += engine.step()[0]
        assert [[ids for _, ids in sorted(done)] for done in finished] == [expected] * 2
        llm.exit()
        llm.exit()
        with pytest.raises(RuntimeError, match="has exited"):
            greedy(llm, PROMPTS, 1)
        assert greedy(other, PROMPTS, 12) == expected  # the other's end is not its own
    gc.collect()
    assert num_open_files() <= files


def test_exit_with_steps_in_flight(path):
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 2)
    llm = LLM(path, **SETTINGS)
    assert torch.get_num_threads() == workers.threads_per_rank(2)
    for prompt in PROMPTS:
        llm.add_request(prompt, SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
    for _ in range(5):
        llm.step()
    start = time.monotonic()
    llm.exit()
    assert time.monotonic() - start < 4  # by itself, not by force
    assert torch.get_num_threads() == threads + 2
    torch.set_num_threads(threads)


RUNNING = """
import sys, time
from nanovllm import LLM, SamplingParams
if __name__ == "__main__":
    if sys.argv[2] == "start":
        print("ready", flush=True)
    llm = LLM(sys.argv[1], device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=16, tensor_parallel_size=2)
    params = SamplingParams(temperature=0, max_tokens=3000, ignore_eos=True)
    print("ready", flush=True)
    if sys.argv[2] in ("idle", "stopped"):
        time.sleep(60)
    if sys.argv[2] == "busy":
        while True:
            llm.generate([[1, 2, 3]], params, use_tqdm=False)
    if sys.argv[2] == "fork":
        import os
        if os.fork() == 0:  # holds copies of all pipes, and must neither keep the workers nor end them
            time.sleep(30)
            os._exit(0)
        time.sleep(60)
    if sys.argv[2] == "end":
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
        llm.add_request([1, 2, 3], params)
        llm.step()
        print("end", flush=True)
    if sys.argv[2] == "forked_exit":
        import os
        pid = os.fork()
        if pid == 0:  # the engine's copy goes, the engine stays
            llm.exit()
            os._exit(0)
        assert os.waitpid(pid, 0)[1] == 0
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3), use_tqdm=False)
        print("end", flush=True)
"""


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("busy", signal.SIGKILL),
        pytest.param("busy", signal.SIGINT, marks=SLOW),
        pytest.param("busy", signal.SIGTERM, marks=SLOW),
        pytest.param("idle", signal.SIGKILL, marks=SLOW),
        pytest.param("stopped", signal.SIGKILL, marks=SLOW),
        pytest.param("idle", signal.SIGTERM, marks=SLOW),
        pytest.param("idle", signal.SIGINT, marks=SLOW),
        pytest.param("fork", signal.SIGKILL, marks=SLOW),
        pytest.param("start", signal.SIGKILL, marks=SLOW),
        pytest.param("start", signal.SIGTERM, marks=SLOW),
        pytest.param("start", signal.SIGINT, marks=SLOW),
    ],
)
def test_pitfall_45_the_end_of_the_parent_is_the_end_of_all(path, tmp_path, mode, number):
    names = shared_memory()
    script = start_script(tmp_path, RUNNING, path, mode)
    try:
        assert script.stdout.readline() == "ready\n", script.stderr.read()
        assert wait_until(lambda: len(workers_of(script.pid)) == 1, 20)
        if mode != "start":
            assert wait_until(lambda: shared_memory(script.pid) <= names, 5)  # not even while it runs
        time.sleep(0.5)
        ranks, all_below = workers_of(script.pid), descendants(script.pid)
        if mode == "stopped":  # which runs no code of ours any more
            os.kill(ranks[0], signal.SIGSTOP)
        if number == signal.SIGINT:
            os.killpg(script.pid, number)  # as a terminal does it: to every process
        else:
            os.kill(script.pid, number)
        watched = ranks if mode == "fork" else all_below
        assert wait_until(lambda: not any(is_alive(pid) for pid in watched), 10)
        assert wait_until(lambda: shared_memory(script.pid) <= names, 10)
    finally:
        if mode == "fork":
            os.killpg(script.pid, signal.SIGKILL)
        _, err = script.communicate(timeout=20)
    assert script.returncode == -number or (number == signal.SIGINT and script.returncode in (1, 130))
    if mode != "start":  # where the segment still has its name, which the tracker then removes, saying so
        assert "resource_tracker" not in err and "leaked" not in err
    assert err.count("Traceback") == (1 if number == signal.SIGINT else 0), err


@pytest.mark.parametrize("mode", ["end", pytest.param("forked_exit", marks=SLOW)])
def test_the_end_of_the_script_ends_the_ranks_quietly(path, tmp_path, mode):
    code, out, err = finish(start_script(tmp_path, RUNNING, path, mode))
    assert (code, out.split()) == (0, ["ready", "end"]), err
    assert err == ""


# Side by side.

MANY_AT_ONCE = """
import sys
from nanovllm import LLM, SamplingParams

if __name__ == "__main__":
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)
    settings = dict(device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=16, tensor_parallel_size=2)
    for _ in range(int(sys.argv[2])):
        with LLM(sys.argv[1], **settings) as llm:
            print(llm.generate([[1, 2, 3]], params, use_tqdm=False)[0]["token_ids"], flush=True)
"""


@pytest.mark.slow
def test_pitfall_44_two_processes_starting_engines_at_once(path, tmp_path):
    """Ten starts each; whatever listens elsewhere, as the first of them does, is in nobody's way."""
    scripts = []
    for name in "ab":
        folder = tmp_path / name
        folder.mkdir()
        scripts.append(start_script(folder, MANY_AT_ONCE, path, "10"))
    results = [finish(script, timeout=150) for script in scripts]
    lines = [line for code, out, _ in results for line in out.splitlines()]
    assert [code for code, *_ in results] == [0, 0], results
    assert len(lines) == 20 and len(set(lines)) == 1
    assert [err for *_, err in results] == ["", ""]


def test_pitfall_44_a_listener_and_two_engines_starting_at_once_in_one_process(path, expected):
    import socket

    listeners = [socket.create_server(("127.0.0.1", port)) for port in (0, 0)]
    listeners += [server for port in (2333, 29500) if (server := listen(port)) is not None]
    llms: list[LLM] = []
    threads = [threading.Thread(target=lambda: llms.append(LLM(path, **SETTINGS))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [greedy(llm, PROMPTS, 12) for llm in llms] == [expected] * 2
    for llm in llms:
        llm.exit()
    for server in listeners:
        server.close()


def listen(port: int) -> object | None:
    import socket

    try:
        return socket.create_server(("127.0.0.1", port))
    except OSError:  # somebody else listens there, which is as good
        return None
