"""`LLM`, what users import: prompts in, completions out."""

from time import perf_counter
from typing import Any

from tqdm.auto import tqdm

from nanovllm.engine.inputs import Prompt, as_params_list, as_prompt_list
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence
from nanovllm.sampling_params import SamplingParams
from nanovllm.utils.interrupts import deferred_interrupt


class LLM(LLMEngine):
    """An offline inference engine for one model."""

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams],
        use_tqdm: bool = True,
    ) -> list[dict[str, Any]]:
        """Complete all prompts, batched as memory allows.

        Args:
            prompts: a string or a list of token ids, or a list of these.
            sampling_params: one for all prompts, or a list with one for each.
            use_tqdm: show a progress bar with prefill and decode tokens per second.

        Returns:
            One dict per prompt, in prompt order: `text` (without special tokens), `token_ids` (EOS included) and
            `finish_reason` ("stop" at EOS, "length" at max_tokens or max_model_len).

        Raises:
            TypeError, ValueError: a prompt or parameter that cannot be honoured, by its index; nothing of the call is
                queued then.
        """
        with self._exclusive():
            return self._generate(prompts, sampling_params, use_tqdm)

    def _generate(
        self, prompts: Prompt | list[Prompt], sampling_params: SamplingParams | list[SamplingParams], use_tqdm: bool
    ) -> list[dict[str, Any]]:
        prompts = as_prompt_list(prompts)
        params = as_params_list(sampling_params, len(prompts), self.encoder.vocab_size)
        with tqdm(total=len(prompts), desc="Tokenizing", disable=not use_tqdm, dynamic_ncols=True) as bar:
            token_ids = self.encoder.encode(prompts, on_progress=lambda _: bar.update())
            bar.reset()
            bar.set_description("Generating")
            seqs: list[Sequence] = []
            try:
                with deferred_interrupt():
                    for ids, one in zip(token_ids, params, strict=True):
                        seqs.append(self._queue(ids, one))
                self._run_until_finished(seqs, bar)
            finally:
                self._forget(seqs)
        return [self._result(seq) for seq in seqs]

    def _run_until_finished(self, seqs: list[Sequence], bar: tqdm) -> None:
        own = {seq.seq_id for seq in seqs}
        tokens = {"Prefill": 0, "Decode": 0}
        start = perf_counter()
        while own or self._in_flight:
            # When all have ended, the step still in flight is settled and no other is launched.
            outputs, num_tokens = self._advance(launch=bool(own))
            assert num_tokens or not own, "nothing can run, and something is left to do"
            # Averages over the call so far: with a step in flight the time of a single one says little.
            tokens["Prefill" if num_tokens > 0 else "Decode"] += abs(num_tokens)
            elapsed = perf_counter() - start
            bar.set_postfix({p: f"{n / elapsed:.0f}tok/s" for p, n in tokens.items()}, refresh=False)
            for seq, _, reason in outputs:
                if reason is not None and seq.seq_id in own:
                    own.remove(seq.seq_id)
                    bar.update()

    def _forget(self, seqs: list[Sequence]) -> None:
        """Leave nothing of the call to `step` or to the next call, not even after an interrupt or a failure."""
        self._roll_back()
        with deferred_interrupt():
            for seq in seqs:
                self.scheduler.finish(seq, "abort")
            own = {seq.seq_id for seq in seqs}
            self._unreported = [(seq_id, ids) for seq_id, ids in self._unreported if seq_id not in own]

    def _result(self, seq: Sequence) -> dict[str, Any]:
        ids = seq.completion_token_ids
        text = "" if self.tokenizer is None else self.tokenizer.decode(ids, skip_special_tokens=True)
        return {"text": text, "token_ids": ids, "finish_reason": seq.finish_reason}
