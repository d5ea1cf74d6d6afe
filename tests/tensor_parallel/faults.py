"""Faults for a worker to die of, and other changes to it: all in place of `workers.worker_main`, for one test.

`strike(monkeypatch, Fault(...))` in the test's process has the next engine's workers start through `main` below, which
patches the worker from the inside. Nothing of this is known to the package.
"""

import functools
import os
import pickle
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nanovllm.engine import workers
from nanovllm.engine.channel import ChannelReader
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.scheduler import Batch
from nanovllm.utils.dist import Group

real_main = workers.worker_main
KINDS = ("raise", "kill", "stall")  # of every fault; "hang" besides


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, and when.

    `when`: "attach", "connect", "weights", "pool", "prefill", "decode", "collective" (the middle of a decode), "exit".
    """

    rank: int
    when: str
    kind: str

    def happen(self) -> None:
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "stall":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.kind == "hang":
            time.sleep(3600)
        raise RuntimeError(f"struck in {self.when}")


def strike(monkeypatch: pytest.MonkeyPatch, fault: Fault) -> None:
    replace_main(monkeypatch, functools.partial(main, fault.rank, functools.partial(plant, fault)))


def replace_main(monkeypatch: pytest.MonkeyPatch, main: Callable[..., None]) -> None:
    monkeypatch.setattr(workers, "worker_main", main)


def main(rank: int, change: Callable[[], None], config: Any, own_rank: int, *args: Any) -> None:
    """`worker_main` of a worker that `change` has changed, if it is the one of `rank` (0: each)."""
    if rank in (0, own_rank):
        change()
    real_main(config, own_rank, *args)


def plant(fault: Fault) -> None:
    """Patch this process so that the fault happens when its time comes."""
    if fault.when in ("prefill", "decode"):
        before(ModelRunner, "launch", lambda runner, batch: batch.is_prefill == (fault.when == "prefill"), fault)
    elif fault.when == "collective":
        in_decode: list[bool] = []

        def note(runner: ModelRunner, batch: Batch) -> bool:
            in_decode.extend([True] * (not batch.is_prefill))
            return False

        before(ModelRunner, "launch", note, fault)
        before(Group, "all_reduce", lambda *_: len(in_decode) > 1, fault)
    elif fault.when == "exit":
        receive = ChannelReader.recv

        def struck_at_the_end(self: ChannelReader) -> Any:
            try:
                return receive(self)
            except EOFError:
                fault.happen()

        ChannelReader.recv = struck_at_the_end
    else:
        places = {
            "attach": (ChannelReader, "__init__"),
            "connect": (workers, "connect"),
            "weights": (ModelRunner, "_load_model"),
            "pool": (ModelRunner, "_bind_cache"),
        }
        before(*places[fault.when], lambda *_: True, fault)


def before(owner: Any, name: str, is_due: Callable[..., bool], fault: Fault) -> None:
    """Have the fault happen at the start of a call to `owner.name` for which `is_due(*args)`."""
    original = getattr(owner, name)

    def struck(*args: Any) -> Any:
        if is_due(*args):
            fault.happen()
        return original(*args)

    setattr(owner, name, struck)


# Other changes to a worker.


def set_blocks(monkeypatch: pytest.MonkeyPatch, num_blocks: dict[int, int]) -> None:
    """Each rank finds memory for so many blocks; a worker fails if it is then asked to use more than the fewest."""
    replace_main(monkeypatch, functools.partial(main_with_blocks, num_blocks))
    monkeypatch.setattr(ModelRunner, "_num_kvcache_blocks", lambda *_: num_blocks[0])


def main_with_blocks(num_blocks: dict[int, int], config: Any, rank: int, *args: Any) -> None:
    bind = ModelRunner._bind_cache

    def checked(self: ModelRunner, number: int) -> None:
        assert number == min(num_blocks.values()), (rank, number)
        bind(self, number)

    ModelRunner._num_kvcache_blocks = lambda *_: num_blocks[rank]
    ModelRunner._bind_cache = checked
    real_main(config, rank, *args)


def record_steps(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Each worker keeps what it was told to compute and the tokens it ended up with; `dump` has it write them."""
    replace_main(monkeypatch, functools.partial(main, 0, functools.partial(install_recorder, str(folder))))


def install_recorder(folder: str) -> None:
    launch = ModelRunner.launch
    steps: list[Any] = []

    def recorded(self: ModelRunner, batch: Batch) -> Any:
        handle = launch(self, batch)
        steps.append(entry(batch, handle.wait()))
        return handle

    def dump(self: ModelRunner) -> None:
        path = Path(folder, f"rank-{self.group.rank}")
        path.with_suffix(".tmp").write_bytes(pickle.dumps(steps))
        path.with_suffix(".tmp").rename(path)
        steps.clear()

    ModelRunner.launch = recorded
    ModelRunner.dump = dump


def entry(batch: Batch, ids: list[int]) -> tuple[Any, ...]:
    """What one rank computed, and the tokens that came of it."""
    return batch.__getstate__(), ids
