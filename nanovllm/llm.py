"""`LLM`, what users import: prompts or conversations in, completions out, whole or as they grow."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.inputs import Message, Prompt, as_prompt_list, render_chat
from nanovllm.engine.llm_engine import LLMEngine, Prepared
from nanovllm.engine.outputs import Request
from nanovllm.sampling_params import SamplingParams


class LLM(LLMEngine):
    """An offline inference engine for one model."""

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """Complete all prompts, batched as memory allows.

        Args:
            prompts: a string, token ids (any flat sequence of integers), `{"prompt": text}`,
                `{"prompt_token_ids": ids}`, or a list of these.
            sampling_params: one for all prompts, or a list with one for each. None: `get_default_sampling_params()`.
            use_tqdm: show a progress bar with prefill and decode tokens per second.

        Returns:
            One dict per prompt, in prompt order:
            - `text`: without special tokens, unless `skip_special_tokens=False`; cut at a stop string.
            - `token_ids`: all of them, with EOS, a stop token, or those that hold the stop string.
            - `finish_reason`: "stop" (EOS, a stop token or a stop string), "length" (max_tokens or max_model_len) or
              "abort"; `stop_reason`: the stop token's id or the stop string, None at EOS.
            - `prompt` (text, None if it was ids) and `prompt_token_ids`; `num_cached_tokens` of them came from the
              prefix cache.
            - `logprobs` and `prompt_logprobs`, if asked for, else None: for each token a dict of token id to `Logprob`.
            - `metrics`: `RequestMetrics`, times in seconds.

        Raises:
            TypeError, ValueError: a prompt or parameter that cannot be honoured, by its index; nothing of the call is
                queued then.
            RuntimeError: the engine has exited, or another thread is using it.
        """
        return self._generate(as_prompt_list(prompts), sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[dict[str, Any]]:
        """Answer one conversation, a list of `{"role": ..., "content": ...}`, or each of a list of conversations.

        Args:
            messages, sampling_params, use_tqdm: as for `generate`.
            chat_template: a Jinja template to use in place of the tokenizer's.
            add_generation_prompt: end the prompt with the beginning of an assistant's turn.
            continue_final_message: leave the last message open, for the model to go on with.
            tools: JSON schemas of functions, for templates that know what to do with them.
            chat_template_kwargs: further variables of the template, such as `{"enable_thinking": False}`.

        Returns and raises what `generate` does; the dicts' `prompt` is the text that the template made.
        """
        prompts = render_chat(
            self.tokenizer,
            messages,
            chat_template=chat_template,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            chat_template_kwargs=chat_template_kwargs,
        )
        return self._generate(prompts, sampling_params, use_tqdm, add_special_tokens=False)

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[dict[str, Any]]:
        """Complete all prompts as `generate` does, and yield what is new of each one after every step.

        A delta is a dict with the `index` of its prompt, its `request_id` (for `abort`), new `text` and `token_ids`,
        `finish_reason` and `stop_reason` (None until the last delta of that prompt), and `logprobs` of the new tokens
        if asked for. Text comes in whole characters and never holds a part of a stop string, so it may be "" for a few
        tokens; joined, it is exactly `generate`'s text.

        Mistakes are raised by the call itself, as by `generate`; work starts with the first delta. Leaving the loop
        aborts what is left. Between two deltas the engine may be used freely: `abort`, `add_request`, `generate`, even
        another stream.
        """
        with self._exclusive():
            prepared = self._prepare(as_prompt_list(prompts), sampling_params)
        return self._deltas(prepared)

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_options: Any,
    ) -> Iterator[dict[str, Any]]:
        """`stream` for conversations; `template_options` are the keywords of `chat`, from `chat_template` on."""
        prompts = render_chat(self.tokenizer, messages, **template_options)
        with self._exclusive():
            prepared = self._prepare(prompts, sampling_params, add_special_tokens=False)
        return self._deltas(prepared)

    def _generate(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        add_special_tokens: bool = True,
    ) -> list[dict[str, Any]]:
        requests: list[Request] = []
        with (
            self._exclusive(),
            tqdm(total=len(prompts), desc="Tokenizing", disable=not use_tqdm, dynamic_ncols=True) as bar,
        ):
            prepared = self._prepare(prompts, sampling_params, add_special_tokens, lambda _: bar.update())
            bar.reset()
            bar.set_description("Generating")
            tokens = {"Prefill": 0, "Decode": 0}
            start = perf_counter()
            with closing(self._run(prepared, requests)) as steps:
                for ended, num_tokens in steps:
                    # Averages over the call so far: with a step in flight the time of a single one says little.
                    tokens["Prefill" if num_tokens > 0 else "Decode"] += abs(num_tokens)
                    elapsed = perf_counter() - start
                    bar.set_postfix({p: f"{n / elapsed:.0f}tok/s" for p, n in tokens.items()}, refresh=False)
                    bar.update(len(ended))
        return [request.result() for request in requests]

    def _deltas(self, prepared: list[Prepared]) -> Iterator[dict[str, Any]]:
        with closing(self._run(prepared, [], streams=True)) as steps:
            for deltas, _ in steps:
                yield from deltas
