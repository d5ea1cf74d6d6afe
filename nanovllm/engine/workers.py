"""The processes of ranks 1 and up: how they start, take commands, fail and end.

`LLMEngine` makes a `Workers` when there is more than one rank. Each process runs `worker_main`: it builds its
`ModelRunner` and executes the commands that rank 0 sends, in lockstep with rank 0.

Nothing outlives anything:
- A worker that raises sends its traceback and ends; a thread of rank 0, the watcher, looks out for that and for silent
  deaths, ends the other workers and breaks off the collective that rank 0 may be waiting in, so that the error reaches
  the caller at once.
- A rank that stalls is a failure like any other: the watcher sees that a process has been stopped or that a step on
  GPUs does not end, and on CPUs the collective of the others times out.
- A worker whose parent is gone, however it died, is killed by the system or ends itself.
- No name is left: the store listens on a port that the system picks, the segment loses its name at the start.
"""

import contextlib
import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
from torch import distributed as dist

from nanovllm.config import Config
from nanovllm.engine.channel import ChannelReader, ChannelWriter
from nanovllm.engine.scheduler import Batch
from nanovllm.utils.dist import Group

logger = logging.getLogger("nanovllm")

# A collective that takes longer means that some rank has stalled. A start that compiles kernels can skew the ranks.
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
EXIT_GRACE_S = 5.0  # what a worker gets to end by itself before it is killed
GPU_STEP_TIMEOUT_S = 60.0
LOOK_S = 1.0  # between two looks whether a rank has been stopped
STOPPED_S = 5.0  # after which a stopped rank counts as failed
SETTLE_S = 0.2  # within which the failures that follow from the first one come in
EXPLAIN_S = 2.0  # for how long an error of rank 0 waits for another rank's failure that may be behind it

_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>
_environment_lock = threading.Lock()  # the environment belongs to the process


class WorkerError(RuntimeError):
    """A rank has failed; the message holds its traceback. The engine has shut down."""


class Workers:
    """Rank 0's handle on the other ranks."""

    def __init__(self, config: Config) -> None:
        """Start the processes and connect with them. Raises WorkerError if one fails before it is connected."""
        _refuse_where_none_can_start()
        self.size = config.tensor_parallel_size
        self.group: Group | None = None
        self._pid = os.getpid()
        self._context = multiprocessing.get_context("spawn")
        self._timeout = COLLECTIVE_TIMEOUT
        self._failure: str | None = None
        self._step_since: float | None = None
        self._step_timeout_s = step_timeout_s(config)
        self._is_ending = False
        self._have_started = threading.Event()  # the processes
        self._start_error: BaseException | None = None
        self._is_explained = threading.Event()  # the watcher has found out whether and why a rank has failed
        self._have_ended = threading.Event()  # the processes
        self._ended_by_themselves = False
        self._watcher: threading.Thread | None = None
        self._reports: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._threads_before, self._threads = torch.get_num_threads(), threads_per_rank(self.size)
        # The store's server lives here; port 0 leaves the choice to the system, and it is bound when we learn it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=self._timeout)
        self._channel = ChannelWriter(self._context, self.size - 1, self._timeout.total_seconds())
        try:
            torch.set_num_threads(self._threads)
            watcher = threading.Thread(target=self._run, args=(config,), name="nanovllm-watcher", daemon=True)
            watcher.start()
            self._watcher = watcher
            self._have_started.wait()
            if self._start_error is not None:
                raise self._start_error
            self._channel.wait_attached()
            self.group = Group(0, self.size, self._connect(config))
        except BaseException as error:
            explained = self.explain(error)
            self.shut_down(grace_s=0)
            self.close()
            if explained is error:
                raise
            raise explained from error

    def _run(self, config: Config) -> None:
        """The watcher's life. It also starts the processes, since the system ends them with the thread they are of."""
        try:
            self._start(config)
        except BaseException as error:
            self._start_error = error
            self._is_explained.set()
            return
        finally:
            self._have_started.set()
        self._watch()

    def _start(self, config: Config) -> None:
        for rank in range(1, self.size):
            ours, theirs = self._context.Pipe(duplex=False)
            self._reports.append(ours)
            reader_end = self._channel.reader_ends[rank - 1]
            arguments = (config, rank, self._store.port, self._timeout, self._channel.segment_name, reader_end, theirs)
            process = self._context.Process(
                target=worker_main, args=arguments, name=f"nanovllm-rank-{rank}", daemon=True
            )
            try:
                with start_environment(self.size):
                    process.start()
                self._processes.append(process)
            finally:
                # From here on only the worker holds these ends, so that its death closes them.
                theirs.close()
                reader_end.close()

    def _connect(self, config: Config) -> "dist.ProcessGroup":
        """Join the group; in a thread, since nothing can break off the wait in there for a rank that has died."""
        outcome: list[Any] = []

        def run() -> None:
            try:
                outcome.append(connect(config, self._store, 0, self.size, self._timeout))
            except Exception as error:
                outcome.append(error)

        thread = threading.Thread(target=run, name="nanovllm-connect", daemon=True)
        thread.start()
        while thread.is_alive():
            if self._failure is not None:
                raise RuntimeError("a rank has ended before it was connected")
            thread.join(0.1)
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _watch(self) -> None:
        """Wait for a report, a death or a stall; then end what is left and free rank 0 from whatever it waits in."""
        stall = None
        num_stopped = 0  # looks in a row that found a rank stopped
        while stall is None and not self._is_ending and not wait(self._reports, timeout=LOOK_S):
            rank = self._stopped_rank()
            num_stopped = 0 if rank is None else num_stopped + 1
            if num_stopped * LOOK_S >= STOPPED_S:
                stall = f"rank {rank} has been stopped (as SIGSTOP does) for {STOPPED_S:g} s"
            since = self._step_since
            if self._step_timeout_s is not None and since and time.monotonic() - since > self._step_timeout_s:
                stall = f"a step has not ended for {self._step_timeout_s:g} s: a rank has stalled"
        if self._is_ending:
            self._is_explained.set()
            self._have_ended.wait()
        else:
            self._failure = stall or self._cause()
            self._is_explained.set()
            self._kill()  # which also closes the connections that rank 0 may be waiting on
        if self.group is not None and not self._ended_by_themselves:
            self.group.abort()

    def _stopped_rank(self) -> int | None:
        """A rank whose process is stopped. When a terminal stops it, so is this process, and looks at nothing."""
        if not hasattr(os, "waitid"):
            return None
        for rank, process in enumerate(self._processes, 1):
            with contextlib.suppress(ChildProcessError):
                if os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None:
                    return rank
        return None

    def _cause(self) -> str:
        """The failure behind the others. One rank's end breaks its peers' collectives, and they fail in turn."""
        time.sleep(SETTLE_S)
        told: list[tuple[float, str]] = []
        for rank, report in enumerate(self._reports, 1):
            try:
                if report.poll():
                    told.append(report.recv())
            except (EOFError, OSError):
                process = self._processes[rank - 1]
                process.join(EXIT_GRACE_S)
                text = f"rank {rank} died without a word, exit code {process.exitcode}"
                if self.group is None:
                    text += (
                        ". If stderr shows that it ran this script from the top: put the code that builds the LLM "
                        "under `if __name__ == '__main__':`"
                    )
                return text
        return min(told)[1]

    def call(self, method: str, *args: Any) -> None:
        """Have every other rank call `method` of its ModelRunner. Does not wait for them."""
        self._channel.send((method, args))

    def launch(self, batch: Batch) -> None:
        """Have every other rank launch a step, which then has to be settled within a time."""
        self._step_since = time.monotonic()
        self.call("launch", batch)

    def settled(self) -> None:
        """A step has come to its end on this rank.

        Raises RuntimeError if that was because another has failed: a collective that is broken off leaves no result.
        """
        self._step_since = None
        if self._failure is not None:
            raise RuntimeError("another rank has failed")

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for `error`: a rank's own failure, if there was one, says more than its consequences here."""
        # Anything else, a user's mistake or an interrupt, does not come from a broken connection.
        if self._watcher is None or not isinstance(error, (RuntimeError, OSError, EOFError)):
            return error
        # The broken connection may be seen here before the watcher, which then ends, has found out why.
        self._is_explained.wait(EXPLAIN_S)
        return error if self._failure is None else WorkerError(self._failure)

    def shut_down(self, grace_s: float = EXIT_GRACE_S) -> None:
        """End all processes, by themselves within `grace_s` if they can; may be called twice, and half-built.

        What is in flight on this rank is broken off if they could not. Call `close` when its CUDA graphs are gone.
        """
        if os.getpid() != self._pid:  # a forked copy of this object: the workers are not its children
            return
        if self._watcher is not None:
            self._have_started.wait()  # an interrupt may have come in between
        self._is_ending = True
        self._channel.close()  # the end of the commands is the signal to end
        deadline = time.monotonic() + grace_s
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        self._ended_by_themselves = all(process.exitcode == 0 for process in self._processes)
        self._kill()
        self._have_ended.set()

    def close(self) -> None:
        """Give back the group and all else that is left after `shut_down`; may be called twice."""
        if os.getpid() != self._pid:
            return
        # Garbage collection may call this from any thread.
        if self._watcher is not None and self._watcher is not threading.current_thread():
            self._watcher.join(EXIT_GRACE_S)
        if self.group is not None:
            self.group.close()
        for report in self._reports:
            report.close()
        for process in self._processes:
            if process.exitcode is not None:  # the system may take its time over one that holds a device
                process.close()
        self._processes.clear()
        self._reports.clear()
        self.group = self._store = None
        # Unless somebody else has changed it since.
        if torch.get_num_threads() == self._threads:
            torch.set_num_threads(self._threads_before)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(EXIT_GRACE_S)


def worker_main(
    config: Config,
    rank: int,
    port: int,
    timeout: timedelta,
    segment_name: str,
    commands: Connection,
    report: Connection,
) -> None:
    """The life of one rank above 0."""
    _die_with_parent()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    exit_code = 0
    try:
        size = config.tensor_parallel_size
        torch.set_num_threads(threads_per_rank(size))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        channel = ChannelReader(segment_name, commands)  # which tells rank 0 that this one has come as far as this
        group = Group(rank, size, connect(config, store, rank, size, timeout))

        from nanovllm.engine.model_runner import ModelRunner

        runner = ModelRunner(config, group)
        while True:
            try:
                method, args = channel.recv()
            except EOFError:
                break
            getattr(runner, method)(*args)
        if runner.device.type == "cuda":
            torch.cuda.synchronize(runner.device)  # rank 0's last step needs this one's part of it
    except BaseException:
        exit_code = 1
        with contextlib.suppress(OSError):
            report.send((time.monotonic(), f"rank {rank} failed:\n{traceback.format_exc()}"))
    # Not through the interpreter's shutdown: a destructor must not wait for a collective that nobody will join.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def _die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends: also while it is stopped, or stuck."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _end_with_parent() -> None:
    """The same where the kernel cannot, or where the parent was gone before it was asked."""
    parent = multiprocessing.parent_process()
    # A process that the parent has forked keeps the sentinel's pipe open; hence also a look every second.
    while os.getppid() == parent.pid and not wait([parent.sentinel], timeout=1.0):
        pass
    os._exit(1)


def connect(config: Config, store: dist.Store, rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
    """A process group of its own over our own store; torch's default group stays free for others."""
    store = dist.PrefixStore("nanovllm", store)
    if uses_cuda(config):
        return connect_gpus(store, rank, size, timeout)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


def connect_gpus(store: dist.Store, rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    # The group's own threads would end the whole process, which is the caller's, when a collective fails.
    with environment(
        TORCH_NCCL_ASYNC_ERROR_HANDLING="2",  # break off what is running, and no more
        TORCH_NCCL_ENABLE_MONITORING="0",
        TORCH_NCCL_DUMP_ON_TIMEOUT="0",
        TORCH_NCCL_RETHROW_CUDA_ERRORS="0",
    ):
        group = dist.ProcessGroupNCCL(store, rank, size, options)
    # NCCL connects the ranks in the first collective; here, so that this wait too can be given up.
    group.allreduce([torch.zeros(1, device=device)]).wait()
    torch.cuda.synchronize(device)
    return group


def step_timeout_s(config: Config) -> float | None:
    """What a step may take. On a CPU it may be minutes, and gloo has a timeout; on a GPU nothing in a graph has one."""
    return GPU_STEP_TIMEOUT_S if uses_cuda(config) else None


def uses_cuda(config: Config) -> bool:
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def threads_per_rank(size: int) -> int:
    """CPU threads of each rank: shared out, since torch processes with default threads slow each other to a crawl."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(available // size, 1)


@contextlib.contextmanager
def start_environment(size: int) -> Iterator[None]:
    """What a process started in here inherits: its share of threads, which OpenMP reads once, and a blocked SIGINT.

    Ctrl-C goes to every process of the terminal, and what it means is for rank 0 to decide.
    """
    with environment(OMP_NUM_THREADS=str(threads_per_rank(size))):
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    """Environment variables for a while; engines that start in several threads take turns."""
    with _environment_lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


def _refuse_where_none_can_start() -> None:
    """RuntimeError, with the remedy, in a process that may not start others."""
    process = multiprocessing.current_process()
    # A spawned process imports the main script; without a guard that would build an engine in there again.
    if getattr(process, "_inheriting", False):
        raise RuntimeError(
            "an LLM with tensor_parallel_size > 1 starts processes that import this script again; put the code that "
            "builds it under `if __name__ == '__main__':`"
        )
    main = sys.modules["__main__"]
    script = getattr(main, "__file__", None)
    if script is not None and getattr(main, "__spec__", None) is None and not os.path.exists(script):
        raise RuntimeError(
            f"an LLM with tensor_parallel_size > 1 starts processes that import this script again, and {script} is no "
            "file; save the script, or pass it to `python -c`"
        )
    if process.daemon:
        raise RuntimeError(
            "an LLM with tensor_parallel_size > 1 starts processes, which Python forbids to a daemonic one like this; "
            "start it with daemon=False"
        )
