"""One-to-many commands between processes: rank 0 writes, the other ranks read, all in the same order.

The bytes go through one shared-memory segment that every reader sees; a pipe per reader says that a piece is there and,
in the other direction, that it has been copied out. The pipes are what orders the memory accesses: a reader looks at
the segment only after it has read the message that was written after the piece, and the writer touches it again only
after every reader's answer. A reader that waits sleeps in the kernel.

The segment has a random name, and none at all once every reader is attached, so that no death can leave it behind.
"""

import contextlib
import pickle
import struct
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext
from multiprocessing.shared_memory import SharedMemory
from typing import Any

BUFFER_SIZE = 1 << 20
_PIECE = struct.Struct("<I?")  # bytes in the segment, whether it is the command's last piece
_ACK = b"a"


class ChannelWriter:
    """Rank 0's end. Not for use from several threads at once."""

    def __init__(self, context: SpawnContext, num_readers: int, buffer_size: int = BUFFER_SIZE) -> None:
        self._memory = SharedMemory(create=True, size=buffer_size)
        self._size = buffer_size
        pipes = [context.Pipe() for _ in range(num_readers)]
        self._pipes: list[Connection] = [ours for ours, _ in pipes]
        # What a reader's process needs; to be closed here when that process has its own copy.
        self.reader_ends: list[Connection] = [theirs for _, theirs in pipes]
        self._unacknowledged = 0
        self._is_open = True

    @property
    def segment_name(self) -> str:
        return self._memory.name

    def wait_attached(self) -> None:
        """Wait until every reader is attached, then take the segment's name away. EOFError if a reader has died."""
        for pipe in self._pipes:
            pipe.recv_bytes()
        self._memory.unlink()

    def send(self, command: Any) -> None:  # noqa: ANN401 (anything that can be pickled)
        """Send one command, in as many pieces as it needs; returns when the last one is in the segment.

        Raises OSError (BrokenPipeError, ConnectionResetError) or EOFError when a reader is gone.
        """
        data = memoryview(pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL))
        for start in range(0, len(data), self._size):
            piece = data[start : start + self._size]
            self._wait_copied()
            self._memory.buf[: len(piece)] = piece
            message = _PIECE.pack(len(piece), start + len(piece) == len(data))
            for pipe in self._pipes:
                pipe.send_bytes(message)
            self._unacknowledged = 1

    def _wait_copied(self) -> None:
        """The segment is free again once every reader has answered for the piece before."""
        if self._unacknowledged:
            for pipe in self._pipes:
                pipe.recv_bytes()
            self._unacknowledged = 0

    def close(self) -> None:
        """Give back the segment and the pipes; may be called twice. Readers see the end of the commands."""
        if not self._is_open:
            return
        self._is_open = False
        for pipe in (*self._pipes, *self.reader_ends):
            pipe.close()
        self._memory.close()
        with contextlib.suppress(FileNotFoundError):  # as usual: its name went when the last reader was attached
            self._memory.unlink()


class ChannelReader:
    """The end of one of the other ranks."""

    def __init__(self, segment_name: str, pipe: Connection) -> None:
        self._memory = SharedMemory(segment_name)
        self._pipe = pipe
        self._pipe.send_bytes(_ACK)

    def recv(self) -> Any:  # noqa: ANN401
        """The next command. Raises EOFError when the writer is gone."""
        data = bytearray()
        is_last = False
        while not is_last:
            length, is_last = _PIECE.unpack(self._pipe.recv_bytes())
            data += self._memory.buf[:length]
            self._pipe.send_bytes(_ACK)
        return pickle.loads(data)

    def close(self) -> None:
        self._pipe.close()
        self._memory.close()
