"""From token ids to text while they are still coming: whole characters only, cut at the first stop string.

`Request` (engine/outputs.py) owns a `Detokenizer` if it streams or has stop strings; every other completion is decoded
once, at its end. Both ways give the same text.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Decode = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are no UTF-8, and for a character not yet complete
_CHAR_BYTES = 4  # of the longest UTF-8 character; a token that is not skipped has at least one byte
_SHORT_WINDOW = 6  # tokens that are decoded faster than the window is moved
_LONGEST_WINDOW = 32
_KEPT_TOKENS = 16


def make_decode(tokenizer: "PreTrainedTokenizerBase", skip_special_tokens: bool) -> Decode:
    """The tokenizer's `decode`, which never "cleans up" spaces: the text is what the tokens say.

    A fast tokenizer is asked directly, for a quarter of the time that transformers' wrapper takes.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens)
    return lambda ids: tokenizer.decode(
        ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
    )


class IncrementalDecoder:
    """Decodes one token at a time, in constant time each. What it returns, joined, is `decode` of all tokens.

    A token means something only beside its neighbours: a character may be spread over several tokens, and some
    tokenizers drop a leading space. So a window of the last tokens is decoded, and what is new in it is returned
    (the prefix and read offsets of Hugging Face's text-generation-inference and of vLLM):

        ids:   [ shown, kept as context | not yet shown ]
               0                        _num_shown_ids

    Text that ends in a replacement character is held back, since the next token may complete it. Bytes that no token
    can complete any more are recognised by their number; then the window is cut without waiting for a whole character.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._ids: list[int] = []
        self._num_shown_ids = 0
        self._text = ""  # of the window
        self._num_shown = 0  # characters of it that have been returned
        self._num_held_ids = 0  # tokens since the text last ended in a whole character

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often "" in the middle of a character."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        if text == self._text and len(self._ids) > 1 and not self._decode([token_id]):
            self._ids.pop()  # a skipped special token: it would only make the window longer
            return ""
        self._text = text
        if not text.endswith(REPLACEMENT):
            self._num_held_ids = 0
            new = text[self._num_shown :]
            if len(self._ids) > _SHORT_WINDOW:
                del self._ids[: self._num_shown_ids]
                self._text = text = self._decode(self._ids)
            self._num_shown_ids = len(self._ids)
            self._num_shown = len(text)
            return new
        self._num_held_ids += 1
        end = len(text.rstrip(REPLACEMENT))
        if self._num_held_ids >= _CHAR_BYTES:
            # So many tokens hold more bytes than a character that is still incomplete can have: only the last ones may
            # belong to one. (It shows as one replacement character, or as one for each byte.)
            end = max(end, len(text) - (_CHAR_BYTES - 1))
        end = max(end, self._num_shown)
        new, self._num_shown = text[self._num_shown : end], end
        if len(self._ids) > _LONGEST_WINDOW:
            self._cut(len(text) - end)
        return new

    def _cut(self, num_held: int) -> None:
        """Keep the last tokens only, of which the last `num_held` characters are not yet shown.

        The cut may split a character, whose rest then reads as up to three wrong ones. They stand at the beginning of
        the window, among what has been shown: three held characters are nine bytes at most, and 16 tokens are more.
        """
        del self._ids[:-_KEPT_TOKENS]
        self._num_shown_ids = 0
        self._text = self._decode(self._ids)
        self._num_shown = len(self._text) - num_held

    def flush(self) -> str:
        """What is still held back, as `decode` shows it: no more tokens come."""
        new, self._num_shown = self._text[self._num_shown :], len(self._text)
        return new


class Detokenizer:
    """The text of one completion as it grows, cut at the first stop string.

    Only text that cannot turn out to be the beginning of a stop string is given out.
    """

    def __init__(
        self, decode: Decode, stop: Sequence[str] = (), include_stop_str: bool = False, min_tokens: int = 0
    ) -> None:
        """A stop string counts if it is complete behind `min_tokens` tokens; `include_stop_str` leaves it in."""
        self._decoder = IncrementalDecoder(decode)
        self._stop = stop
        self._stop_chars = set("".join(stop))
        self._include_stop_str = include_stop_str
        self._min_tokens = min_tokens
        self._num_tokens = 0
        self._held = ""  # decoded, and perhaps the beginning of a stop string
        self._pieces: list[str] = []  # all that is certain; joined once, so that time stays linear
        self._num_taken = 0  # pieces that a stream has handed on

    def push(self, token_id: int) -> str | None:
        """Add one token; returns the stop string that it completed, behind which the text is cut."""
        self._num_tokens += 1
        new = self._decoder.push(token_id)
        if not new:
            return None
        if not self._stop:
            self._pieces.append(new)
            return None
        text = self._held + new
        if self._num_tokens > self._min_tokens and (found := self._find_stop(text, len(self._held))):
            start, end, stop = found
            self._pieces.append(text[: end if self._include_stop_str else start])
            self._held = ""
            return stop
        # A stop string that is completed later begins in what is held here, so nothing before it is searched again.
        split = len(text)
        if text[-1] in self._stop_chars:
            split -= max(partial_match(text, stop) for stop in self._stop)
        self._pieces.append(text[:split])
        self._held = text[split:]
        return None

    def _find_stop(self, text: str, num_old: int) -> tuple[int, int, str] | None:
        """(start, end, stop string) of the match that is complete first, and ends behind `num_old` characters.

        Which one that is does not depend on how the text falls into tokens; the earlier in the list wins a tie.
        """
        matches = []
        for order, stop in enumerate(self._stop):
            if stop not in text:
                continue
            start = text.find(stop, max(0, num_old - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), order, start, stop))
        if not matches:
            return None
        end, _, start, stop = min(matches)
        return start, end, stop

    def finish(self) -> None:
        """No more tokens come: give out what was held back."""
        self._pieces.append(self._held + self._decoder.flush())
        self._held = ""

    def take(self) -> str:
        """The text that has become certain since the last call."""
        new = "".join(self._pieces[self._num_taken :])
        self._num_taken = len(self._pieces)
        return new

    @property
    def text(self) -> str:
        """All text so far that is certain; after `finish` or a stop string, all text."""
        return "".join(self._pieces)


def partial_match(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
