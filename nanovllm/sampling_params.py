"""How one request is sampled and when it stops. Users build it; the engine reads it and never changes it.

Names, ranges and meaning are those of vLLM's class of the same name; the default of `max_tokens` is nano-vLLM's.
"""

import difflib
import math
import numbers
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

# Far beyond uniform; a larger one would drown the logits in the rounding of the noise, and overflow in the end.
MAX_TEMPERATURE = 1e6
MAX_LOGPROBS = 20  # as vLLM's default; what it bounds is the memory and the copies of every step


class _Number(NamedTuple):
    """What a numeric field may be: `what` says in words what `low`, `high` and the flags say."""

    what: str
    low: float
    high: float = math.inf
    remedy: str = ""
    is_integer: bool = False
    may_be_none: bool = False
    excludes_low: bool = False

    def check(self, name: str, value: Any) -> float | int | None:
        if value is None and self.may_be_none:
            return None
        message = f"{name}={value!r} must be {self.what}" + (f"; {self.remedy}" if self.remedy else "")
        # bool is a subclass of int: without its own check True would pass as temperature 1 or as one token.
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise TypeError(message)
        if self.is_integer and not isinstance(value, numbers.Integral):
            raise ValueError(message)
        # A NaN fails as well.
        if not (self.low < value if self.excludes_low else self.low <= value) or not value <= self.high:
            raise ValueError(message)
        return int(value) if self.is_integer else float(value)


_NUMBERS = {
    "temperature": _Number(f"between 0 and {MAX_TEMPERATURE:.0e}", 0, MAX_TEMPERATURE, "use 0 for greedy"),
    "max_tokens": _Number(
        "an integer of at least 1, or None for as many as max_model_len allows", 1, is_integer=True, may_be_none=True
    ),
    "top_k": _Number("an integer of at least 1, or 0 or -1 for no limit", -1, is_integer=True),
    "top_p": _Number("above 0 and at most 1", 0, 1, "use 1 for no limit", excludes_low=True),
    "min_p": _Number("between 0 and 1", 0, 1, "use 0 for no limit"),
    "repetition_penalty": _Number("above 0 and at most 1e+06", 0, 1e6, "use 1 for none", excludes_low=True),
    "presence_penalty": _Number("between -2 and 2", -2, 2, "use 0 for none"),
    "frequency_penalty": _Number("between -2 and 2", -2, 2, "use 0 for none"),
    "seed": _Number(
        "an integer of 64 bits, or None or -1 for a random one", -(2**63), 2**63 - 1, is_integer=True, may_be_none=True
    ),
    "min_tokens": _Number("an integer of at least 0", 0, is_integer=True),
    "logprobs": _Number(
        f"an integer between 0 and {MAX_LOGPROBS}, or None for none", 0, MAX_LOGPROBS, is_integer=True, may_be_none=True
    ),
    "prompt_logprobs": _Number(
        f"an integer between 0 and {MAX_LOGPROBS}, or None for none", 0, MAX_LOGPROBS, is_integer=True, may_be_none=True
    ),
}
_FLAGS = ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output")
_BIAS = _Number("between -100 and 100", -100, 100)

# What vLLM's class has and this one has not.
_ELSEWHERE = {
    "n": "repeat the prompt instead: generate([prompt] * n, ...)",
    "best_of": "repeat the prompt instead, with logprobs=0, and choose",
    "use_beam_search": "beam search is not built in",
    "guided_decoding": "constrained decoding is not built in",
    "structured_outputs": "constrained decoding is not built in",
    "logits_processors": "logit_bias adds constants to logits; code of one's own is not run",
    "allowed_token_ids": "use logit_bias",
    "bad_words": "use logit_bias with -100 for single tokens, or stop to end there",
    "truncate_prompt_tokens": "cut the prompt's ids before the call",
    "detokenize": "pass skip_tokenizer_init=True to LLM for ids only",
    "spaces_between_special_tokens": "it has no effect on fast tokenizers, the only ones used here",
    "output_kind": "generate gives whole completions, stream gives increments",
    "early_stopping": "beam search is not built in",
    "length_penalty": "beam search is not built in",
}


@dataclass(slots=True)
class SamplingParams:
    """Parameters of one request, or of every request of a `generate` call.

    Filters act in this order: `logit_bias` and `min_tokens`, the penalties, `temperature`, `min_p`, `top_k`, `top_p`.

    Raises TypeError for a value of the wrong kind or a name that is no field, and ValueError for a number that cannot
    be honoured; each message holds the field, the value and what is possible.
    """

    # Divides the logits before sampling. 0 is greedy: the exact argmax, the lowest id on a tie.
    temperature: float = 1.0
    # Completion tokens to produce at most; None: as many as `max_model_len` leaves room for.
    max_tokens: int | None = 64
    # Keep generating past an end-of-sequence token (benchmarks want a known length).
    ignore_eos: bool = False
    # Sample among the k most likely tokens; 0 or -1: all.
    top_k: int = 0
    # Sample among the most likely tokens that together reach this probability, the one that crosses it included.
    top_p: float = 1.0
    # Sample among the tokens at least this many times as likely as the most likely one.
    min_p: float = 0.0
    # Above 1 discourages tokens of the prompt and of the completion: positive logits are divided, others multiplied.
    repetition_penalty: float = 1.0
    # Subtracted from the logits of the completion's tokens: once, and as often as they occur.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # The same seed gives the same noise whatever else runs beside the request; None or -1: one of its own.
    seed: int | None = None
    # Texts that end the completion.
    stop: str | list[str] | None = None
    # Ids that end the completion; they stay in its ids.
    stop_token_ids: list[int] | None = None
    # Completion tokens before which neither EOS nor `stop_token_ids` can be sampled and no `stop` text counts.
    min_tokens: int = 0
    # Report the log probability of each sampled token, and of so many most likely ones besides.
    logprobs: int | None = None
    # The same for the tokens of the prompt.
    prompt_logprobs: int | None = None
    # Added to the logits of these ids.
    logit_bias: dict[int, float] | None = None
    # Leave special tokens such as EOS out of the text.
    skip_special_tokens: bool = True
    # Leave the stop text in the text.
    include_stop_str_in_output: bool = False

    def __new__(cls, *_: object, **kwargs: object) -> "SamplingParams":
        """Refuses names that are no fields, before the generated `__init__` does so without a remedy."""
        names = [field.name for field in fields(cls)]
        for name in kwargs:
            if name in _ELSEWHERE:
                raise TypeError(f"SamplingParams has no {name!r}; {_ELSEWHERE[name]}")
            if name not in names:
                nearest = difflib.get_close_matches(name, names, n=1)
                hint = f"did you mean {nearest[0]!r}?" if nearest else f"its fields are {', '.join(names)}"
                raise TypeError(f"SamplingParams has no {name!r}; {hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields; once more when a request is made, since a field may have been set meanwhile."""
        for name, rule in _NUMBERS.items():
            setattr(self, name, rule.check(name, getattr(self, name)))
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r} must be True or False")
        if self.seed == -1:
            self.seed = None
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens={self.min_tokens} must be at most max_tokens={self.max_tokens}")
        self.stop = self._checked_stop()
        self.stop_token_ids = self._checked_ids("stop_token_ids", self.stop_token_ids)
        self.logit_bias = self._checked_bias()

    def check_vocab(self, vocab_size: int) -> None:
        """ValueError if a field names a token id that the model has not."""
        for name in ("stop_token_ids", "logit_bias"):
            bad = [i for i in getattr(self, name) if not 0 <= i < vocab_size]
            if bad:
                raise ValueError(f"{name} holds token id {bad[0]}; ids go from 0 to {vocab_size - 1}")

    def _checked_stop(self) -> list[str]:
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        if stop is None:
            return []
        if not isinstance(stop, (list, tuple)) or not all(isinstance(text, str) for text in stop):
            raise TypeError(f"stop={self.stop!r} must be a string, a list of strings, or None")
        if "" in stop:
            raise ValueError(f"stop={self.stop!r} must not hold an empty string, which would end every completion")
        return list(stop)

    @staticmethod
    def _checked_ids(name: str, ids: Any) -> list[int]:
        if ids is None:
            return []
        if isinstance(ids, (str, bytes, dict)) or not isinstance(ids, Iterable):
            raise TypeError(f"{name}={ids!r} must be a list of token ids, or None")
        ids = list(ids)
        if not all(isinstance(i, numbers.Integral) and not isinstance(i, bool) for i in ids):
            raise TypeError(f"{name}={ids!r} must hold integer token ids only")
        return [int(i) for i in ids]

    def _checked_bias(self) -> dict[int, float]:
        if self.logit_bias is None:
            return {}
        if not isinstance(self.logit_bias, dict):
            raise TypeError(f"logit_bias={self.logit_bias!r} must be a dict of token id to bias, or None")
        ids = self._checked_ids("logit_bias", self.logit_bias.keys())
        biases = [_BIAS.check(f"logit_bias[{i}]", bias) for i, bias in zip(ids, self.logit_bias.values(), strict=True)]
        return dict(zip(ids, biases, strict=True))
