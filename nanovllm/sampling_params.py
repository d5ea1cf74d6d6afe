"""How one request is sampled and when it stops. Users build it; the engine reads it and never changes it."""

import numbers
from dataclasses import dataclass

# Far beyond uniform; a larger one would drown the logits in the rounding of the noise, and overflow in the end.
MAX_TEMPERATURE = 1e6


@dataclass(slots=True)
class SamplingParams:
    """Parameters of one request, or of every request of a `generate` call.

    Raises TypeError for a value of the wrong kind and ValueError for a number that cannot be honoured.
    """

    # Divides the logits before sampling. 0 is greedy: the exact argmax, the lowest id on a tie.
    temperature: float = 1.0
    # Completion tokens to produce at most; None: as many as `max_model_len` leaves room for.
    max_tokens: int | None = 64
    # Keep generating past an end-of-sequence token (benchmarks want a known length).
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Check all fields; once more when a request is made, since a field may have been set meanwhile."""
        # bool is a subclass of int: without its own check True would pass as temperature 1 or as one token.
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, numbers.Real):
            raise TypeError(
                f"temperature={self.temperature!r} is not a number; use 0 for greedy, 1.0 for plain sampling"
            )
        if not 0 <= self.temperature <= MAX_TEMPERATURE:  # a NaN fails as well
            raise ValueError(
                f"temperature={self.temperature!r} must be between 0 and {MAX_TEMPERATURE:.0e}; use 0 for greedy"
            )
        self.temperature = float(self.temperature)

        if self.max_tokens is not None:
            remedy = "give an integer of at least 1, or None for as many as max_model_len allows"
            if isinstance(self.max_tokens, bool) or not isinstance(self.max_tokens, numbers.Real):
                raise TypeError(f"max_tokens={self.max_tokens!r} is not a number; {remedy}")
            if not isinstance(self.max_tokens, numbers.Integral) or self.max_tokens < 1:
                raise ValueError(f"max_tokens={self.max_tokens!r} is not possible; {remedy}")
            self.max_tokens = int(self.max_tokens)

        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos={self.ignore_eos!r} must be True or False")
