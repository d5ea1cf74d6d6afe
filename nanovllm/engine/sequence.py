"""One request on its way through the engine.

The `LLMEngine` creates a `Sequence`, the `Scheduler` moves it between its queues and advances its counters, and the
`BlockManager` owns what stands in its `block_table`. Plain Python, no torch.
"""

from collections.abc import Collection
from enum import Enum, auto
from typing import NamedTuple

from nanovllm.sampling_params import SamplingParams


class SequenceStatus(Enum):
    """Where a sequence is: queued (or half-prefilled), decoding, or done."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


Logprobs = list[tuple[int, float, int]]
"""Of one position: (token id, log probability under the raw logits, rank from 1), the position's own token first, then
the most likely ones besides, in order. Ranks order by logit, and by id where logits are equal."""


class Sampling(NamedTuple):
    """What the sampling of a request takes beyond an argmax over noise; the runner keeps it by row."""

    temperature: float
    seed: int
    top_k: int  # 0: off
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: dict[int, float]

    @classmethod
    def of(cls, params: SamplingParams, seed: int) -> "Sampling":
        return cls(
            params.temperature,
            seed,
            max(params.top_k, 0),
            params.top_p,
            params.min_p,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
            dict(params.logit_bias),
        )

    @property
    def has_filters(self) -> bool:
        """Whether some tokens cannot be sampled; greedy rows take the best one, which always can."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)


class RowExtras(NamedTuple):
    """What the runner has to know about a row that asks for more than temperature and seed; sent at admission."""

    row: int
    sampling: Sampling
    has_filters: bool
    banned: list[int]  # ids that cannot be sampled ...
    banned_until: int  # ... before this position; 0 if there are none
    num_logprobs: int | None
    num_prompt_tokens: int
    history: list[int]  # the tokens so far, if there are penalties to count them for


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
        "min_tokens",
        "ignore_eos",
        "seed",
        "stop",
        "stop_token_ids",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "sampling",
        "finish_reason",
        "stop_reason",
        "num_logprobs",
        "logprobs",
        "num_prompt_logprobs",
        "prompt_logprobs",
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
        """`max_tokens` is the request's own limit, already cut to what `max_model_len` leaves room for.

        `seed` counts where the parameters name none.
        """
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
        # Copies: the parameters are the user's, who may change them meanwhile.
        params = sampling_params
        self.temperature = params.temperature
        self.max_tokens = max_tokens
        self.min_tokens = params.min_tokens
        self.ignore_eos = params.ignore_eos
        self.seed = seed if params.seed is None else params.seed
        self.stop = tuple(params.stop)
        self.stop_token_ids = frozenset(params.stop_token_ids)
        self.include_stop_str_in_output = params.include_stop_str_in_output
        self.skip_special_tokens = params.skip_special_tokens
        self.sampling = Sampling.of(params, self.seed)
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None  # the stop token id, or the stop text, that ended it; None at EOS
        self.num_logprobs = params.logprobs
        self.num_prompt_logprobs = params.prompt_logprobs
        # One entry per completion token, and per prompt token (None for the first), of those that were asked for.
        self.logprobs: list[Logprobs] = []
        self.prompt_logprobs: list[Logprobs | None] = []

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

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether some of the prompt's log probabilities are asked for and not there: all of it has to be computed."""
        return self.num_prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens

    def extras(self, eos_token_ids: Collection[int]) -> RowExtras | None:
        """What the sequence's row needs besides temperature and seed, given its tokens so far; None if nothing."""
        sampling, has_filters = self.sampling, self.sampling.has_filters
        banned = sorted(self.stop_token_ids.union(() if self.ignore_eos else eos_token_ids)) if self.min_tokens else []
        banned_until = self.num_prompt_tokens + self.min_tokens if banned else 0
        plain = not (has_filters or sampling.has_penalties or sampling.logit_bias or banned)
        if plain and self.num_logprobs is None:
            return None
        history = list(self.token_ids) if sampling.has_penalties else []
        return RowExtras(
            self.row, sampling, has_filters, banned, banned_until, self.num_logprobs, self.num_prompt_tokens, history
        )

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
