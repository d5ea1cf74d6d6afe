"""The processes of ranks 1 and up: how they start, take commands, fail and end.

`LLMEngine` makes a `Workers` when there is more than one rank. Each process runs `worker_main`: it builds its
`ModelRunner`, says that it is ready, and executes the commands that rank 0 sends, in lockstep with rank 0.

Nothing outlives anything:
- A worker that raises sends its traceback and ends; a thread of rank 0 watches for that and for silent deaths, ends the
  other workers and breaks off the collective that rank 0 may be waiting in, so the error reaches the caller at once.
- A worker whose parent is gone, however it died, ends itself: it watches a pipe that the system closes.
- No name is left: the store listens on a port that the system picks, the segment loses its name at the start.
"""

import contextlib
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
from nanovllm.utils.dist import Group

logger = logging.getLogger("nanovllm")

# A collective that takes longer means that some rank has stalled. A start that compiles kernels can skew the ranks.
COLLECTIVE_TIMEOUT = timedelta(seconds=300)
EXIT_GRACE_S = 5.0  # what a worker gets to end by itself before it is killed


class WorkerError(RuntimeError):
    """A rank has failed; the message holds its traceback. The engine has shut down."""


class Workers:
    """Rank 0's handle on the other ranks."""

    def __init__(self, config: Config, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        """Start the processes and connect with them. Raises WorkerError if one fails before it is connected."""
        _refuse_import_of_main()
        self.size = config.tensor_parallel_size
        self._context = multiprocessing.get_context("spawn")
        self._failure: str | None = None
        self._is_ending = False
        self.group: Group | None = None
        # The store's server lives here; port 0 leaves the choice to the system, and it is bound when we learn it.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
        self._channel = ChannelWriter(self._context, self.size - 1)
        self._reports: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        try:
            self._start(config, timeout)
            self._channel.wait_attached()
            self.group = Group(0, self.size, connect(config, self._store, 0, self.size, timeout))
        except BaseException as error:
            self.shut_down()
            raise self.explain(error) from error

    def _start(self, config: Config, timeout: timedelta) -> None:
        for rank in range(1, self.size):
            ours, theirs = self._context.Pipe(duplex=False)
            reader_end = self._channel.reader_ends[rank - 1]
            arguments = (config, rank, self._store.port, timeout, self._channel.segment_name, reader_end, theirs)
            process = self._context.Process(
                target=worker_main, args=arguments, name=f"nanovllm-rank-{rank}", daemon=True
            )
            with thread_environment(config, self.size):
                process.start()
            theirs.close()
            reader_end.close()
            self._processes.append(process)
            self._reports.append(ours)
        self._watcher = threading.Thread(target=self._watch, name="nanovllm-watcher", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        """Wait for the first report or death; then end what is left and free rank 0 from whatever it waits in."""
        sentinels = {process.sentinel: rank for rank, process in enumerate(self._processes, 1)}
        reports = {report: rank for rank, report in enumerate(self._reports, 1)}
        first = wait([*sentinels, *reports])[0]
        if self._is_ending:
            return
        rank = sentinels.get(first) or reports[first]
        report = self._reports[rank - 1]
        text = None
        with contextlib.suppress(EOFError, OSError):
            text = report.recv() if report.poll(1.0) else None
        if text is None:
            self._processes[rank - 1].join(EXIT_GRACE_S)
            text = (
                f"rank {rank} died without a word, exit code {self._processes[rank - 1].exitcode}. If the script "
                "has no `if __name__ == '__main__':` guard around what builds the LLM, add it"
            )
        self._failure = self._failure or text
        self._kill()
        if self.group is not None:
            self.group.abort()

    def call(self, method: str, *args: Any) -> None:  # noqa: ANN401
        """Have every other rank call `method` of its ModelRunner. Does not wait for them."""
        self._channel.send((method, args))

    def explain(self, error: BaseException) -> BaseException:
        """What to raise for `error`: a rank's own failure, if there was one, says more than its consequences here."""
        if not isinstance(error, Exception):  # an interrupt stays one
            return error
        deadline = time.monotonic() + EXIT_GRACE_S
        # The broken connection may be seen here before the watcher has read the report.
        while self._failure is None and time.monotonic() < deadline and any(p.exitcode for p in self._processes):
            time.sleep(0.05)
        return error if self._failure is None else WorkerError(self._failure)

    def shut_down(self) -> None:
        """End all workers, by themselves if they can; may be called twice and on a half-built object."""
        self._is_ending = True
        with contextlib.suppress(OSError, EOFError):
            self._channel.close()  # the end of the commands is the signal to end
        deadline = time.monotonic() + EXIT_GRACE_S
        for process in self._processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        self._kill()
        for report in self._reports:
            report.close()
        self.group = None

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
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
    # Ctrl-C goes to the whole process group; rank 0 decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        channel = ChannelReader(segment_name, commands)
        torch.set_num_threads(threads_per_rank(config.tensor_parallel_size))
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timeout)
        size = config.tensor_parallel_size
        group = Group(rank, size, connect(config, store, rank, size, timeout))

        from nanovllm.engine.model_runner import ModelRunner

        runner = ModelRunner(config, group)
        while True:
            try:
                method, args = channel.recv()
            except EOFError:
                break
            getattr(runner, method)(*args)
    except BaseException:
        with contextlib.suppress(OSError):
            report.send(f"rank {rank} failed:\n{traceback.format_exc()}")
    # Not through the interpreter's shutdown: a destructor must not wait for a collective that nobody will join.
    sys.stderr.flush()
    os._exit(0)


def _end_with_parent() -> None:
    wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def connect(config: Config, store: dist.Store, rank: int, size: int, timeout: timedelta) -> "dist.ProcessGroup":
    """A process group of its own over our own store; torch's default group stays free for others."""
    store = dist.PrefixStore("nanovllm", store)
    if uses_cuda(config):
        torch.cuda.set_device(rank)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    return dist.ProcessGroupGloo(store, rank, size, options)


def uses_cuda(config: Config) -> bool:
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def threads_per_rank(size: int) -> int:
    """CPU threads of each rank: shared out, since torch processes with default threads slow each other to a crawl."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(available // size, 1)


@contextlib.contextmanager
def thread_environment(config: Config, size: int) -> Iterator[None]:
    """OpenMP reads its thread count when a process starts: set it for the processes started in here."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = str(threads_per_rank(size))
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before


def _refuse_import_of_main() -> None:
    """A spawned process imports the main script; without a guard that would build an engine in there again."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise RuntimeError(
            "an LLM with tensor_parallel_size > 1 starts processes that import this script again; put the code that "
            "builds it under `if __name__ == '__main__':`"
        )
