"""What users get back: a request with its text, its times, and the dicts that `generate` and `stream` hand out.

`LLMEngine` makes one `Request` around every `Sequence`; the scheduler never sees it. Between commit and output stands
`Request.follow`, for the requests that stream or have stop strings.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from nanovllm.engine.detokenizer import Decode, Detokenizer
from nanovllm.engine.sequence import Logprobs, Sequence

STOP, ABORT = "stop", "abort"


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position, under the model's raw logits, as in vLLM."""

    logprob: float
    rank: int  # 1: the most likely token of the vocabulary
    decoded_token: str | None  # of the token alone, so a part of a character shows as U+FFFD; None without a tokenizer


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds that a request took. None: it ended before it came so far.

    Times are no part of an answer: any two compare equal, so that equal answers do.
    """

    # From being queued until a step computes its first tokens.
    queue_time: float | None = field(compare=False)
    # From being queued until its first token has reached the host.
    time_to_first_token: float | None = field(compare=False)
    # Mean over the tokens after the first; None with fewer than two.
    time_per_output_token: float | None = field(compare=False)
    # From being queued until its end.
    total_time: float | None = field(compare=False)


class Request:
    """One request as its user sees it. `LLMEngine` appends it to its `outbox` when it has ended or, if it streams, with
    every token."""

    __slots__ = (
        "seq",
        "prompt",
        "outbox",
        "streams",
        "detokenizer",
        "num_cached_tokens",
        "queued_at",
        "scheduled_at",
        "first_token_at",
        "finished_at",
        "_decode",
        "_decode_one",
        "_num_followed",
        "_num_taken",
    )

    def __init__(
        self,
        seq: Sequence,
        prompt: str | None,
        decodes: Mapping[bool, Decode],
        outbox: list["Request"],
        streams: bool = False,
    ) -> None:
        """`prompt` is the text, where there is one; `decodes`, by skip_special_tokens, is empty without a tokenizer."""
        decode = decodes.get(seq.skip_special_tokens)
        self.seq = seq
        self.prompt = prompt
        self.outbox = outbox
        self.streams = streams
        self.detokenizer: Detokenizer | None = None
        if decode is not None and (streams or seq.stop):
            self.detokenizer = Detokenizer(decode, seq.stop, seq.include_stop_str_in_output, seq.min_tokens)
        self.num_cached_tokens = 0  # when it was first admitted; after a preemption some of its own may be cached
        self.queued_at = perf_counter()
        self.scheduled_at: float | None = None
        self.first_token_at: float | None = None
        self.finished_at: float | None = None
        self._decode = decode
        self._decode_one = decodes.get(False)  # every token has a text, special ones too
        self._num_followed = 0  # completion tokens that the detokenizer has seen
        self._num_taken = 0  # completion tokens that a stream has handed out

    @property
    def is_followed(self) -> bool:
        """Whether something is to be done after every token of it."""
        return self.streams or self.detokenizer is not None

    def follow(self) -> str | None:
        """Decode the tokens committed since the last call; the stop string that they complete, if they do.

        It looks at the sequence, not at a step's outputs, so that a step whose outputs were lost does no harm.
        """
        seq, detokenizer = self.seq, self.detokenizer
        if detokenizer is None:
            return None
        end = seq.num_completion_tokens - self._ends_with_stop_token
        while self._num_followed < end:
            self._num_followed += 1
            stop = detokenizer.push(seq.token_ids[seq.num_prompt_tokens + self._num_followed - 1])
            if stop is not None:
                return stop
        if seq.is_finished:
            detokenizer.finish()
        return None

    @property
    def _ends_with_stop_token(self) -> bool:
        """Whether the last token only ends the completion: EOS and stop tokens are no part of the text, as in vLLM."""
        seq = self.seq
        is_stop_token = seq.finish_reason == STOP and not isinstance(seq.stop_reason, str)
        return is_stop_token and not seq.include_stop_str_in_output

    def metrics(self) -> RequestMetrics:
        num_tokens = self.seq.num_completion_tokens
        per_token = None
        if num_tokens > 1 and self.finished_at is not None:
            per_token = (self.finished_at - self.first_token_at) / (num_tokens - 1)
        queue, first, total = (
            None if at is None else at - self.queued_at
            for at in (self.scheduled_at, self.first_token_at, self.finished_at)
        )
        return RequestMetrics(queue, first, per_token, total)

    def text(self) -> str:
        """The whole completion as text, once it has ended; "" without a tokenizer."""
        if self.detokenizer is not None:
            return self.detokenizer.text
        if self._decode is None:
            return ""
        ids = self.seq.completion_token_ids
        return self._decode(ids[:-1] if self._ends_with_stop_token else ids)

    def result(self) -> dict[str, Any]:
        """What `generate` returns for this request."""
        seq = self.seq
        return {
            "text": self.text(),
            "token_ids": seq.completion_token_ids,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
            "prompt": self.prompt,
            "prompt_token_ids": seq.prompt_token_ids,
            "num_cached_tokens": self.num_cached_tokens,
            "logprobs": None if seq.num_logprobs is None else self._named(seq.logprobs),
            "prompt_logprobs": None if seq.num_prompt_logprobs is None else self._named(seq.prompt_logprobs),
            "metrics": self.metrics(),
        }

    def take_delta(self, index: int) -> dict[str, Any]:
        """What `stream` yields: all that is new since the last call."""
        seq = self.seq
        start = self._num_taken
        token_ids = seq.token_ids[seq.num_prompt_tokens + start :]
        self._num_taken += len(token_ids)
        return {
            "index": index,
            "request_id": seq.seq_id,
            "text": "" if self.detokenizer is None else self.detokenizer.take(),
            "token_ids": token_ids,
            "finish_reason": seq.finish_reason,
            "stop_reason": seq.stop_reason,
            "logprobs": None if seq.num_logprobs is None else self._named(seq.logprobs[start : start + len(token_ids)]),
        }

    def _named(self, positions: list[Logprobs | None]) -> list[dict[int, Logprob] | None]:
        """The runner's tuples as vLLM's dicts, the position's own token first."""
        decode = self._decode_one
        return [
            None
            if position is None
            else {i: Logprob(logprob, rank, None if decode is None else decode([i])) for i, logprob, rank in position}
            for position in positions
        ]
