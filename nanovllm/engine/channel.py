"""One-to-many commands between processes: rank 0 writes, the other ranks read, all in the same order.

The bytes go through one shared-memory segment that every reader sees; a pipe per reader says that a piece is there and,
in the other direction, that it has been copied out. The pipes are what orders the memory accesses: a reader looks at
the segment only after it has read the message that was written after the piece, and the writer touches it again only
after every reader's answer. A reader that waits sleeps in the kernel. (Messages go by plain reads and writes: they have
one size each, and multiprocessing's own framing costs twice as much as the system calls.)

The segment has a random name, and none at all once every reader is attached, so that no death can leave it behind.
"""

import contextlib
import os
import pickle
import secrets
import select
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

    def __init__(
        self, context: SpawnContext, num_readers: int, timeout_s: float, buffer_size: int = BUFFER_SIZE
    ) -> None:
        """`timeout_s`: a reader that does not answer for so long has stalled."""
        self._timeout_s = timeout_s
        self._size = buffer_size
        pipes = [context.Pipe() for _ in range(num_readers)]
        self._pipes: list[Connection] = [ours for ours, _ in pipes]
        self._polls = [select.poll() for _ in pipes]
        for pipe, poll in zip(self._pipes, self._polls, strict=True):
            poll.register(pipe, select.POLLIN)
        # What a reader's process needs; to be closed here when that process has its own copy.
        self.reader_ends: list[Connection] = [theirs for _, theirs in pipes]
        self._is_read = True  # the segment, by everybody
        self._is_open = True
        # Random, and whose it is, for those who look into /dev/shm.
        name = f"nanovllm-{os.getpid()}-{secrets.token_hex(4)}"
        self._memory = SharedMemory(name, create=True, size=buffer_size)
        self._is_named = True

    @property
    def segment_name(self) -> str:
        return self._memory.name

    def wait_attached(self) -> None:
        """Wait until every reader is attached, then take the segment's name away. Raises like `send`."""
        self._wait_answers()
        self._unlink()

    def _unlink(self) -> None:
        if self._is_named:
            self._is_named = False
            self._memory.unlink()

    def send(self, command: Any) -> None:
        """Send one command, anything that can be pickled, in as many pieces as it needs.

        Returns when the last piece is in the segment, not when it has been read.
        Raises OSError (BrokenPipeError, ConnectionResetError) or EOFError when a reader is gone, TimeoutError when one
        has stalled.
        """
        data = memoryview(pickle.dumps(command, protocol=pickle.HIGHEST_PROTOCOL))
        for start in range(0, len(data), self._size):
            piece = data[start : start + self._size]
            if not self._is_read:
                self._wait_answers()
            self._is_read = False
            self._memory.buf[: len(piece)] = piece
            message = _PIECE.pack(len(piece), start + len(piece) == len(data))
            for pipe in self._pipes:
                os.write(pipe.fileno(), message)

    def _wait_answers(self) -> None:
        """Until every reader has answered once more: it is attached, or has copied the last piece."""
        for pipe, poll in zip(self._pipes, self._polls, strict=True):
            if not poll.poll(self._timeout_s * 1000):
                raise TimeoutError(f"a rank has not answered for {self._timeout_s:g} s")
            if not os.read(pipe.fileno(), len(_ACK)):
                raise EOFError("a rank has left")

    def close(self) -> None:
        """Give back the segment and the pipes; may be called twice. Readers see the end of the commands."""
        if not self._is_open:
            return
        self._is_open = False
        for pipe in (*self._pipes, *self.reader_ends):
            pipe.close()
        self._memory.close()
        self._unlink()


class ChannelReader:
    """The end of one of the other ranks."""

    def __init__(self, segment_name: str, pipe: Connection) -> None:
        self._memory = SharedMemory(segment_name)
        self._pipe = pipe
        os.write(self._pipe.fileno(), _ACK)

    def recv(self) -> Any:
        """The next command. Raises EOFError when the writer is gone, after the last command that it has sent."""
        length, is_last = self._next_piece()
        if is_last:  # as nearly every command is: unpickled where it stands, so that nothing is between it and its use
            command = pickle.loads(self._memory.buf[:length])
            self._answer()
            return command
        data = bytearray(self._memory.buf[:length])
        while not is_last:
            self._answer()
            length, is_last = self._next_piece()
            data += self._memory.buf[:length]
        self._answer()
        return pickle.loads(data)

    def _next_piece(self) -> tuple[int, bool]:
        """Its length, and whether it is the last, once it is there."""
        message = b""
        with contextlib.suppress(ConnectionResetError):  # the writer left with an answer of ours unread
            message = os.read(self._pipe.fileno(), _PIECE.size)
        if not message:
            raise EOFError("rank 0 has left")
        return _PIECE.unpack(message)

    def _answer(self) -> None:
        """That the piece may be overwritten."""
        with contextlib.suppress(OSError):  # the writer sent this and left, which the next message will tell
            os.write(self._pipe.fileno(), _ACK)

    def close(self) -> None:
        self._pipe.close()
        self._memory.close()
