"""What the spawned readers of the channel tests do."""

import time
from multiprocessing.connection import Connection

from nanovllm.engine.channel import ChannelReader


def echo_digests(segment: str, commands: Connection, answers: Connection, delay_s: float = 0.0) -> None:
    """Read commands until the writer closes, each after a pause; then answer with a digest of all, in order."""
    reader = ChannelReader(segment, commands)
    digests = []
    while True:
        time.sleep(delay_s)
        try:
            digests.append(digest(reader.recv()))
        except EOFError:
            break
    answers.send(digests)
    reader.close()


def echo(segment: str, commands: Connection, answers: Connection) -> None:
    """Answer every command with itself, then with how the channel ended."""
    reader = ChannelReader(segment, commands)
    while True:
        try:
            answers.send(reader.recv())
        except (EOFError, OSError) as error:
            answers.send(type(error).__name__)
            return


def digest(command: object) -> tuple[object, int]:
    """Small, and different for different commands: (its number, a hash of the rest)."""
    number, payload = command
    return number, hash(tuple(payload))
