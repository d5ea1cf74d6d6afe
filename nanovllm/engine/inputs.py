"""What users hand to `generate`, `chat`, `stream` and `add_request`, checked and turned into token ids; the tokenizer.

All of it happens before anything is queued, so that one bad prompt costs nothing but its own call.
"""

import copy
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import numpy as np

from nanovllm.config import Config
from nanovllm.models.model_config import read_generation_config
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids (any flat sequence of integers), `{"prompt": text}` or `{"prompt_token_ids": ids}`."""

Message = Mapping[str, Any]
"""One turn of a conversation, `{"role": ..., "content": ...}`; what else it may hold is the chat template's affair."""

# What generation_config.json may say about sampling. As in vLLM, its do_sample counts for nothing; unlike there, its
# max_new_tokens does not either: the default of max_tokens is nano-vLLM's.
_GENERATION_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")

_TOKENIZE_BATCH = 256

# A tokenizer has at least one of these.
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def as_prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt of any kind becomes a list of one; a list of prompts stays as it is."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if not is_sequence(prompts):
        raise TypeError(
            f"prompts is a {type(prompts).__name__}; give a string, a list of token ids, or a list of such prompts"
        )
    if getattr(prompts, "ndim", 1) == 0:
        raise TypeError("prompts is a single number; give a string, a list of token ids, or a list of such prompts")
    if isinstance(prompts, Sequence):
        prompts = list(prompts)
        return [prompts] if prompts and isinstance(prompts[0], (int, np.integer)) else prompts
    return [prompts] if prompts.ndim == 1 and len(prompts) and prompts.dtype != object else list(prompts)


def is_sequence(value: Any) -> bool:
    """Whether `value` may be a sequence of token ids or of prompts: a list, a range, an array, a tensor."""
    if isinstance(value, (str, bytes, bytearray, memoryview)):
        return False
    return isinstance(value, Sequence) or (hasattr(value, "tolist") and hasattr(value, "ndim"))


def prompt_text(prompt: Prompt) -> str | None:
    """The text of a prompt, if it came with one."""
    if isinstance(prompt, Mapping):
        prompt = prompt.get("prompt")
    return prompt if isinstance(prompt, str) else None


def as_params_list(
    params: SamplingParams | Sequence[SamplingParams], num_prompts: int, vocab_size: int
) -> list[SamplingParams]:
    """A SamplingParams for each prompt, checked once more: copies, since the users may change theirs meanwhile."""

    def checked(one: SamplingParams) -> SamplingParams:
        one = copy.copy(one)
        one.check()  # which also makes lists and dicts of its own
        one.check_vocab(vocab_size)
        return one

    if isinstance(params, SamplingParams):
        return [checked(params)] * num_prompts
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
    copies = {id(one): checked(one) for one in {id(one): one for one in params}.values()}
    return [copies[id(one)] for one in params]


def default_sampling_params(path: str) -> SamplingParams:
    """SamplingParams with what the model's generation_config.json says about sampling; ValueError if that is wrong."""
    raw = read_generation_config(path)
    known = {f.name for f in fields(SamplingParams)}
    given = {name: raw[name] for name in _GENERATION_FIELDS if raw.get(name) is not None and name in known}
    try:
        return SamplingParams(**given)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}/generation_config.json: {error}; correct it, or pass sampling_params") from error


def as_conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation becomes a list of one. Every message must have a role and something to say."""
    remedy = 'give a list of {"role": ..., "content": ...}, or a list of such conversations'
    if not isinstance(messages, (list, tuple)):
        raise TypeError(f"messages is a {type(messages).__name__}; {remedy}")
    conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
    checked = []
    for i, conversation in enumerate(conversations):
        if not isinstance(conversation, (list, tuple)):
            raise TypeError(f"conversation {i} is a {type(conversation).__name__}; {remedy}")
        if not conversation:
            raise ValueError(f"conversation {i} is empty; give it at least one message")
        for j, message in enumerate(conversation):
            where = f"message {j} of conversation {i}"
            if not isinstance(message, Mapping):
                raise TypeError(f"{where} is a {type(message).__name__}; {remedy}")
            if not isinstance(message.get("role"), str):
                raise ValueError(f"{where} has no role; {remedy}")
            if message.get("content") is None and not message.get("tool_calls"):
                raise ValueError(f"{where} has no content; {remedy}")
        checked.append(
            [_as_text(message, f"message {j} of conversation {i}") for j, message in enumerate(conversation)]
        )
    return checked


def _as_text(message: Message, where: str) -> Message:
    """The message with text for content. Parts, as OpenAI's API has them, are joined line by line (as in vLLM)."""
    content = message.get("content", "")
    if content is None:  # beside tool calls; templates expect a string
        return {**message, "content": ""}
    if isinstance(content, str):
        return message
    parts = content if isinstance(content, (list, tuple)) else [content]
    for part in parts:
        if not (isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise ValueError(
                f"{where} has a part that is no text ({part!r:.80}); give a string, or parts like "
                '{"type": "text", "text": "..."}'
            )
    return {**message, "content": "\n".join(part["text"] for part in parts)}


def render_chat(
    tokenizer: "PreTrainedTokenizerBase | None",
    messages: Sequence[Message] | Sequence[Sequence[Message]],
    *,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[str]:
    """The text of each conversation, as the tokenizer's chat template (or the given one) has it.

    Special tokens are in it, BOS too where the model wants one, so it is tokenized without adding any.
    """
    conversations = as_conversations(messages)
    if tokenizer is None:
        raise ValueError("chat needs a tokenizer, and skip_tokenizer_init=True left none; use generate with token ids")
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError("the tokenizer has no chat template; pass chat_template=, or use generate with text")
    if add_generation_prompt and continue_final_message:
        raise ValueError(
            "continue_final_message=True leaves the last message open, add_generation_prompt=True begins a new one; "
            "pass add_generation_prompt=False"
        )
    texts = []
    for i, conversation in enumerate(conversations):
        try:
            text = tokenizer.apply_chat_template(
                list(conversation),
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,  # text in transformers 4 and 5 alike
                **(chat_template_kwargs or {}),
            )
        except Exception as error:  # a template is a program, which raises what it likes
            raise ValueError(
                f"the chat template does not take conversation {i} ({error}); change the messages, chat_template or "
                "chat_template_kwargs"
            ) from error
        texts.append(text)
    return texts


def load_tokenizer(path: str) -> "PreTrainedTokenizerBase":
    """The checkpoint's own tokenizer; ValueError with the remedy if there is none."""
    from transformers import AutoTokenizer

    remedy = "add the tokenizer files, or pass skip_tokenizer_init=True and give token ids"
    # Where there is no vocabulary transformers 5 makes up an empty tokenizer, which turns every text into no tokens.
    if not any(os.path.exists(os.path.join(path, name)) for name in _VOCABULARY_FILES):
        raise ValueError(f"{path}: no tokenizer ({', '.join(_VOCABULARY_FILES)}) is in there; {remedy}")
    try:
        return AutoTokenizer.from_pretrained(path)
    except Exception as error:  # transformers raises what its many readers raise
        raise ValueError(f"{path}: no tokenizer could be loaded ({error}); {remedy}") from error


def eos_token_ids(config: Config, tokenizer: "PreTrainedTokenizerBase | None") -> set[int]:
    """Every id that ends a completion: those of generation_config.json, config.json and the tokenizer."""
    ids = set(config.model_config.eos_token_ids)
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.add(tokenizer.eos_token_id)
    return ids


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

    def encode(
        self,
        prompts: list[Prompt],
        add_special_tokens: bool = True,
        on_progress: Callable[[int], object] = lambda _: None,
    ) -> list[list[int]]:
        """Ids of all prompts, in order; types and given ids are checked before any text is tokenized.

        `add_special_tokens=False` is for the text of a chat template, which has a BOS in it if the model wants one.
        """
        texts: dict[int, str] = {}
        encoded: list[list[int] | None] = []
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, Mapping):
                prompt = self._unpack(i, prompt)
            if isinstance(prompt, str):
                if self.tokenizer is None:
                    raise ValueError(
                        f"prompt {i} is text, but skip_tokenizer_init=True left no tokenizer; give token ids"
                    )
                try:
                    prompt.encode()
                except UnicodeEncodeError as error:
                    raise ValueError(f"prompt {i} is no valid text ({error}); remove the lone surrogate") from error
                texts[i] = prompt
                encoded.append(None)
            else:
                encoded.append(self._check_ids(i, prompt))
        for i, ids in self._tokenize(texts, add_special_tokens):
            encoded[i] = self._check_ids(i, ids)
            on_progress(i)
        return encoded

    def _unpack(self, index: int, prompt: Mapping[str, Any]) -> Any:
        """What a dict gives as the prompt: its ids if it has some (vLLM's TokensPrompt), else its text."""
        ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
        if (ids is None and text is None) or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            keys = ", ".join(map(repr, prompt)) or "nothing"
            raise TypeError(
                f"prompt {index} is a dict that holds {keys}; give {{'prompt': text}} or {{'prompt_token_ids': ids}}, "
                "and conversations to llm.chat"
            )
        if isinstance(ids, (str, Mapping)) or not isinstance(text, (str, type(None))):
            raise TypeError(f"prompt {index} must hold text under 'prompt' and ids under 'prompt_token_ids'")
        return text if ids is None else ids

    def _tokenize(self, texts: dict[int, str], add_special_tokens: bool) -> Iterator[tuple[int, list[int]]]:
        indices = list(texts)
        for start in range(0, len(indices), _TOKENIZE_BATCH):
            some = indices[start : start + _TOKENIZE_BATCH]
            batch = self.tokenizer([texts[i] for i in some], add_special_tokens=add_special_tokens, verbose=False)
            yield from zip(some, batch["input_ids"], strict=True)

    def _check_ids(self, index: int, ids: Any) -> list[int]:  # noqa: ANN401 (it is what this finds out)
        if not is_sequence(ids) or getattr(ids, "ndim", 1) == 0:
            raise TypeError(f"prompt {index} is a {type(ids).__name__}; give a string or a list of token ids")
        if len(ids) == 0:
            raise ValueError(f"prompt {index} is empty; give it at least one token")
        if not isinstance(ids, Sequence):
            ids = ids.tolist()
        kinds = set(map(type, ids))
        if any(issubclass(kind, Mapping) for kind in kinds):
            raise TypeError(
                f"prompt {index} is a conversation; pass it to llm.chat, or turn it into text with "
                "llm.tokenizer.apply_chat_template first"
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
