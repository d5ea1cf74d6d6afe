"""The command channel: nothing lost, torn or out of order, whatever the size; no name left; no work while idle."""

import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest

from nanovllm.engine.channel import BUFFER_SIZE, ChannelReader, ChannelWriter
from nanovllm.engine.scheduler import Batch
from tests.tensor_parallel import readers
from tests.tensor_parallel.processes import cpu_seconds, num_open_files, shared_memory

SPAWN = get_context("spawn")


class Peer:
    """A reader process and what it answers."""

    def __init__(self, process: BaseProcess, answers: Connection) -> None:
        self.process = process
        self._answers = answers

    def answer(self) -> object:
        assert self._answers.poll(60), "the reader hangs"
        return self._answers.recv()


@contextmanager
def channel(target: object, num_readers: int = 1, buffer_size: int = BUFFER_SIZE, **kwargs: object) -> Iterator[tuple]:
    """(writer, [Peer]); all readers are attached."""
    writer = ChannelWriter(SPAWN, num_readers, timeout_s=60, buffer_size=buffer_size)
    peers = []
    for reader_end in writer.reader_ends:
        ours, theirs = SPAWN.Pipe()
        process = SPAWN.Process(
            target=target, args=(writer.segment_name, reader_end, theirs), kwargs=kwargs, daemon=True
        )
        process.start()
        reader_end.close()
        theirs.close()
        peers.append(Peer(process, ours))
    try:
        writer.wait_attached()
        yield writer, peers
    finally:
        writer.close()
        for peer in peers:
            peer.process.kill()
            peer.process.join()


@contextmanager
def local_channel(buffer_size: int, num_readers: int = 1) -> Iterator[tuple[ChannelWriter, list[ChannelReader]]]:
    """Writer and readers in this process, for what does not depend on there being two."""
    writer = ChannelWriter(SPAWN, num_readers, timeout_s=5, buffer_size=buffer_size)
    # Copies, as another process would have them: the writer closes its own.
    ends = [Connection(os.dup(end.fileno())) for end in writer.reader_ends]
    for end in writer.reader_ends:
        end.close()
    attached = [ChannelReader(writer.segment_name, end) for end in ends]
    writer.wait_attached()
    try:
        yield writer, attached
    finally:
        writer.close()
        for reader in attached:
            reader.close()


def read_all(reader: ChannelReader, into: list[object]) -> threading.Thread:
    def run() -> None:
        try:
            while True:
                into.append(reader.recv())
        except EOFError:
            pass

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def big_command(number: int, rng_step: int) -> tuple[int, list[int]]:
    return number, [(number * rng_step + i * 7) % 50021 for i in range(number * 37 % 900)]


@pytest.mark.parametrize("delay_s", [0.002, pytest.param(0.05, marks=pytest.mark.slow)])
def test_pitfall_40_a_slow_reader_loses_nothing(delay_s):
    """1,000 commands, as fast as they go in, through a buffer that the longer ones overflow."""
    commands = [big_command(number, 13) for number in range(1000)]
    with channel(readers.echo_digests, buffer_size=1024, delay_s=delay_s) as (writer, (peer,)):
        for command in commands:
            writer.send(command)
        writer.close()
        assert peer.answer() == [readers.digest(command) for command in commands]


def test_readers_of_different_speed_all_see_the_same():
    commands = [big_command(number, 17) for number in range(300)]
    received: list[list[object]] = [[], [], []]
    with local_channel(512, num_readers=3) as (writer, attached):
        threads = [read_all(reader, into) for reader, into in zip(attached, received, strict=True)]
        for command in commands:
            writer.send(command)
        writer.close()
        for thread in threads:
            thread.join(30)
    assert received == [commands] * 3


def test_pitfall_43_a_command_larger_than_the_buffer():
    """256 prompts of 4,000 ids, which no buffer of 1 MiB holds."""
    batch = Batch(is_prefill=True, rows=list(range(256)), counts=[4000] * 256)
    batch.token_ids = [[(i * 4001 + j) % 151936 for j in range(4000)] for i in range(256)]
    assert len(pickle.dumps(batch)) > 2 * BUFFER_SIZE
    with channel(readers.echo) as (writer, (peer,)):
        writer.send(("launch", (batch,)))
        writer.send("small")
        assert peer.answer() == ("launch", (batch,))
        assert peer.answer() == "small"


def test_commands_of_exactly_the_buffers_size_and_around_it():
    size = 4096
    overhead = len(pickle.dumps(b"x" * size, protocol=pickle.HIGHEST_PROTOCOL)) - size
    lengths = [n * size + d - overhead for n in (1, 2, 3) for d in (-1, 0, 1)]
    commands = [os.urandom(length) for length in lengths]
    sizes = [len(pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL)) for command in commands]
    assert sizes == [n * size + d for n in (1, 2, 3) for d in (-1, 0, 1)]
    received: list[object] = []
    with local_channel(size) as (writer, (reader,)):
        thread = read_all(reader, received)
        for command in commands:
            writer.send(command)
        writer.close()
        thread.join(30)
    assert received == commands


def test_what_cannot_be_pickled_is_refused_before_anything_is_sent():
    with local_channel(4096) as (writer, (reader,)):
        with pytest.raises((TypeError, AttributeError, pickle.PicklingError)):
            writer.send(lambda: None)
        writer.send(1)
        assert reader.recv() == 1


def test_the_segment_has_no_name_once_all_are_attached():
    before = shared_memory()
    writer = ChannelWriter(SPAWN, 2, timeout_s=5)
    name = writer.segment_name.removeprefix("/")
    assert name in shared_memory() - before
    attached = [ChannelReader(writer.segment_name, end) for end in writer.reader_ends]
    writer.wait_attached()
    assert name not in shared_memory()
    writer.send("still works")
    assert [reader.recv() for reader in attached] == ["still works"] * 2
    writer.close()
    writer.close()
    for reader in attached:
        reader.close()


def test_a_writer_that_never_got_its_readers_leaves_no_name_and_no_file():
    ChannelWriter(SPAWN, 1, timeout_s=5).close()  # the first one starts the resource tracker
    files = num_open_files()
    writer = ChannelWriter(SPAWN, 3, timeout_s=5)
    name = writer.segment_name.removeprefix("/")
    assert name in shared_memory()
    writer.close()
    assert name not in shared_memory() and num_open_files() == files


def test_idle_ends_use_no_cpu_and_see_each_others_death():
    with channel(readers.echo, num_readers=2) as (writer, (first, second)):
        for number in range(20):
            writer.send(number)
        assert [first.answer() for _ in range(20)] == list(range(20))
        start = cpu_seconds(first.process.pid), time.process_time()
        time.sleep(2)
        assert cpu_seconds(first.process.pid) - start[0] <= 0.02
        assert time.process_time() - start[1] < 0.2

        first.process.kill()
        first.process.join()
        with pytest.raises((OSError, EOFError)):
            for number in range(3):
                writer.send(number)
        writer.close()
        while isinstance(answer := second.answer(), int):
            pass
        assert answer == "EOFError"


def test_a_reader_that_stalls_is_not_waited_for_for_ever():
    with channel(readers.echo) as (writer, (peer,)):
        writer._timeout_s = 0.5
        os.kill(peer.process.pid, signal.SIGSTOP)
        writer.send(1)
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=r"not answered for 0\.5 s"):
            writer.send(2)
        assert time.monotonic() - start < 5
