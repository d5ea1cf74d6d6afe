"""One request on its way through the engine.

The `LLMEngine` creates a `Sequence`, the `Scheduler` moves it between its queues and advances its counters, and the
`BlockManager` owns what stands in its `block_table`. Plain Python, no torch.
"""

from enum import Enum, auto

from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is: queued (or half-prefilled), decoding, or done."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


class Sequence:
    """Tokens of one request, prompt first, and how far the engine has come with them.

    Three counters move left to right over `token_ids`:

        0 ........ num_computed_tokens ........ num_scheduled_tokens ........ num_tokens
          K/V in the cache, settled    K/V being computed by         known, K/V not yet
                                       a step in flight              asked for

    A decode step computes the position `num_scheduled_tokens`. With a step in flight that position may lie one past
    the last token the host knows: its id then exists on the device only. `row` is the sequence's line in the
    runner's tables while it holds blocks, -1 otherwise.
    """

    __slots__ = (
        "seq_id",
        "status",
        "token_ids",
        "last_token",
        "num_tokens",
        "num_prompt_tokens",
        "num_cached_tokens",
        "num_scheduled_tokens",
        "num_computed_tokens",
        "block_table",
        "block_hashes",
        "block_size",
        "row",
        "temperature",
        "max_tokens",
        "ignore_eos",
        "seed",
        "finish_reason",
    )

    def __init__(
        self,
        seq_id: int,
        token_ids: list[int],
        sampling_params: SamplingParams,
        *,
        max_tokens: int,
        block_size: int = 256,
        seed: int = 0,
    ) -> None:
        """`max_tokens` is the request's own limit, already cut to what `max_model_len` leaves room for."""
        assert token_ids and max_tokens >= 1, (len(token_ids), max_tokens)
        self.seq_id = seq_id
        self.status = SequenceStatus.WAITING
        self.token_ids = list(token_ids)
        self.last_token = token_ids[-1]
        self.num_tokens = len(token_ids)
        self.num_prompt_tokens = len(token_ids)
        self.num_cached_tokens = 0
        self.num_scheduled_tokens = 0
        self.num_computed_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[int] = []  # of the leading full blocks; grown by the BlockManager, never invalidated
        self.block_size = block_size
        self.row = -1
        self.temperature = sampling_params.temperature
        self.max_tokens = max_tokens
        self.ignore_eos = sampling_params.ignore_eos
        self.seed = seed
        self.finish_reason: str | None = None

    def __len__(self) -> int:
        return self.num_tokens

    def __getitem__(self, key: int | slice) -> int | list[int]:
        return self.token_ids[key]

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id}, {self.status.name}, {self.num_prompt_tokens}+{self.num_completion_tokens} tokens)"
        )

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED

    @property
    def num_completion_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def completion_token_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_blocks(self) -> int:
        """Blocks that hold all known tokens."""
        return -(-self.num_tokens // self.block_size)

    @property
    def last_block_num_tokens(self) -> int:
        return self.num_tokens - (self.num_blocks - 1) * self.block_size

    @property
    def is_last_token_scheduled(self) -> bool:
        """Whether the steps launched so far already yield every token that the request may have."""
        return self.num_scheduled_tokens + 1 >= self.num_prompt_tokens + self.max_tokens

    def block(self, i: int) -> list[int]:
        """Token ids of block `i` (the last one may be partly filled)."""
        assert 0 <= i < self.num_blocks, (i, self.num_blocks)
        return self.token_ids[i * self.block_size : (i + 1) * self.block_size]

    def append_token(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.last_token = token_id
        self.num_tokens += 1

    def __getstate__(self) -> dict[str, object]:
        """Pickle small: once it decodes, a sequence needs only its last token to go on, not the history.

        A preempted one is computed again, completion included, so having passed its prompt is not enough.
        """
        state = {name: getattr(self, name) for name in self.__slots__ if name != "block_hashes"}
        if self.num_completion_tokens > 0 and self.num_computed_tokens + 1 >= self.num_tokens:
            state["token_ids"] = []
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        self.block_hashes = []
        for name, value in state.items():
            setattr(self, name, value)
