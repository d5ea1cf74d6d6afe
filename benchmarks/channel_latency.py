"""How long a command takes from rank 0 to the other ranks, over the channel that tensor parallelism uses.

python benchmarks/channel_latency.py --readers 1 --commands 2000

From before the command is pickled to after the last reader has unpickled it, on the one monotonic clock of the machine.
A decode step of 256 sequences is a typical command.
"""

import argparse
import itertools
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from nanovllm.engine.channel import ChannelReader, ChannelWriter
from nanovllm.engine.scheduler import Batch


def read(segment: str, commands: Connection, answers: Connection) -> None:
    """A rank that does nothing but take commands; ends with the times at which it had each."""
    reader = ChannelReader(segment, commands)
    times = []
    while True:
        try:
            reader.recv()
        except EOFError:
            break
        times.append(time.perf_counter_ns())
    answers.send(times)


def decode_step(num_seqs: int) -> Batch:
    batch = Batch(is_prefill=False, rows=list(range(num_seqs)), starts=[1000] * num_seqs, counts=[1] * num_seqs)
    batch.samples = [True] * num_seqs
    return batch


def measure(num_readers: int, num_commands: int, num_seqs: int, pause_s: float) -> dict[str, float]:
    """Microseconds from before the command is pickled until the last reader has it unpickled; median, 90 %, 99 %.

    With a pause the commands come one by one, as steps do: when one is sent, the readers sleep and rank 0 comes from
    other work. Without one, each waits for the one before.
    """
    spawn = multiprocessing.get_context("spawn")
    writer = ChannelWriter(spawn, num_readers, timeout_s=60)
    processes, pipes = [], []
    for reader_end in writer.reader_ends:
        ours, theirs = spawn.Pipe()
        processes.append(spawn.Process(target=read, args=(writer.segment_name, reader_end, theirs), daemon=True))
        processes[-1].start()
        reader_end.close()
        theirs.close()
        pipes.append(ours)
    writer.wait_attached()
    command = ("launch", (decode_step(num_seqs),))
    sent = []
    for _ in range(num_commands):
        resume = time.perf_counter() + pause_s
        while time.perf_counter() < resume:
            pass
        sent.append(time.perf_counter_ns())
        writer.send(command)
    writer.close()
    received = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    taken = sorted((max(times) - start) / 1000 for start, *times in zip(sent, *received, strict=True))
    at = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: taken[int(share * (num_commands - 1))] for name, share in at.items()} | {
        "mean": statistics.fmean(taken)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readers", type=int, nargs="+", default=[1])
    parser.add_argument("--commands", type=int, default=2000)
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[1, 256])
    parser.add_argument("--pause-ms", type=float, nargs="+", default=[0, 2])
    args = parser.parse_args()
    print("readers  sequences  pause ms  median us   p90 us   p99 us  mean us")
    for readers, num_seqs, pause in itertools.product(args.readers, args.num_seqs, args.pause_ms):
        us = measure(readers, args.commands, num_seqs, pause / 1000)
        figures = f"{us['median']:9.1f}  {us['p90']:7.1f}  {us['p99']:7.1f}  {us['mean']:7.1f}"
        print(f"{readers:7}  {num_seqs:9}  {pause:8g}  {figures}")


if __name__ == "__main__":
    main()
