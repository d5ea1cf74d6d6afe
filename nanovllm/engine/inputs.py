"""What users hand to `generate` and `add_request`, checked and turned into token ids before anything is queued."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | list[int]

_TOKENIZE_BATCH = 256


def as_prompt_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """One prompt, text or ids, becomes a list of one; a list of prompts stays as it is."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, (list, tuple, np.ndarray)):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}; give a string, a list of token ids, or a list of such prompts"
        )
    if isinstance(prompts, np.ndarray) and prompts.ndim == 0:
        raise TypeError("prompts is a single number; give a string, a list of token ids, or a list of such prompts")
    prompts = list(prompts)
    return [prompts] if prompts and isinstance(prompts[0], (int, np.integer)) else prompts


def as_params_list(
    params: SamplingParams | list[SamplingParams], num_prompts: int, vocab_size: int
) -> list[SamplingParams]:
    """One SamplingParams for each prompt, checked once more."""
    if isinstance(params, SamplingParams):
        params.check()
        params.check_vocab(vocab_size)
        return [params] * num_prompts
    if not isinstance(params, (list, tuple)):
        raise TypeError(
            f"sampling_params is a {type(params).__name__}; give a SamplingParams, or a list with one for each prompt"
        )
    if len(params) != num_prompts:
        raise ValueError(
            f"there are {num_prompts} prompts and {len(params)} sampling_params; give one for all, or one for each"
        )
    for i, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params[{i}] is a {type(one).__name__}, not a SamplingParams")
    for one in {id(one): one for one in params}.values():
        one.check()
        one.check_vocab(vocab_size)
    return list(params)


class PromptEncoder:
    """Text and ids to checked lists of ids. A prompt that cannot be honoured is refused by its index."""

    def __init__(
        self, tokenizer: "PreTrainedTokenizerBase | None", vocab_size: int, max_model_len: int, len_remedy: str
    ) -> None:
        """`len_remedy` says what to do about a prompt that is too long."""
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.len_remedy = len_remedy

    def encode(self, prompts: list[Prompt], on_progress: Callable[[int], object] = lambda _: None) -> list[list[int]]:
        """Ids of all prompts, in order; types and given ids are checked before any text is tokenized."""
        texts: list[int] = []
        encoded: list[list[int] | None] = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise ValueError(
                        f"prompt {i} is text, but skip_tokenizer_init=True left no tokenizer; give token ids"
                    )
                try:
                    prompt.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(f"prompt {i} is no valid text ({error}); remove the lone surrogate") from error
                texts.append(i)
                encoded.append(None)
            else:
                encoded.append(self._check_ids(i, prompt))
        for i, ids in self._tokenize(prompts, texts):
            encoded[i] = self._check_ids(i, ids)
            on_progress(i)
        return encoded

    def _tokenize(self, prompts: list[Prompt], texts: list[int]) -> Iterator[tuple[int, list[int]]]:
        for start in range(0, len(texts), _TOKENIZE_BATCH):
            indices = texts[start : start + _TOKENIZE_BATCH]
            yield from zip(
                indices, self.tokenizer([prompts[i] for i in indices], verbose=False)["input_ids"], strict=True
            )

    def _check_ids(self, index: int, ids: Any) -> list[int]:  # noqa: ANN401 (it is what this finds out)
        if not isinstance(ids, (list, tuple, np.ndarray)):
            raise TypeError(f"prompt {index} is a {type(ids).__name__}; give a string or a list of token ids")
        if len(ids) == 0:
            raise ValueError(f"prompt {index} is empty; give it at least one token")
        if isinstance(ids, np.ndarray):
            ids = ids.tolist()
        kinds = set(map(type, ids))
        if dict in kinds:
            raise TypeError(
                f"prompt {index} is a conversation; turn it into text with llm.tokenizer.apply_chat_template first"
            )
        if not all(issubclass(kind, (int, np.integer)) and kind is not bool for kind in kinds):
            raise TypeError(f"prompt {index} must be a flat list of integer token ids")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            bad = next(i for i in ids if not 0 <= i < self.vocab_size)
            raise ValueError(f"prompt {index} holds token id {bad}; ids go from 0 to {self.vocab_size - 1}")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens, and max_model_len={self.max_model_len} must also hold at "
                f"least one new one; {self.len_remedy}"
            )
        return [int(i) for i in ids] if kinds != {int} else list(ids)
