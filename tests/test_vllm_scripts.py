"""What people type who come from vLLM, on the bundled model: the same names, the same calls, and what comes of them.

Differences that remain: results are dicts (`output["text"]`), as in nano-vLLM; `max_tokens` is 64 by default.
"""

import math

import pytest

from nanovllm import LLM, SamplingParams

ASK = [{"role": "user", "content": "What is 27 + 58?"}]
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
NO_THINKING = {"enable_thinking": False}


@pytest.fixture(scope="module")
def llm(bundled_model):
    with LLM(model=bundled_model, device="cpu", max_model_len=512, num_kvcache_blocks=32) as llm:
        yield llm


def test_quick_start(llm):
    prompts = ["Once upon a time", "The capital of France is", "Spell garden."]
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    outputs = llm.generate(prompts, sampling_params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output["prompt"] == prompt
        assert output["prompt_token_ids"] == llm.tokenizer(prompt)["input_ids"]
        assert isinstance(output["text"], str) and 1 <= len(output["token_ids"]) <= 64
        assert output["finish_reason"] in ("stop", "length")


def test_default_parameters_come_from_the_checkpoint(llm):
    sampling_params = llm.get_default_sampling_params()
    assert (sampling_params.temperature, sampling_params.top_k, sampling_params.top_p) == (0.6, 20, 0.95)
    sampling_params.max_tokens = 5
    assert len(llm.generate("Once upon a time", sampling_params)[0]["token_ids"]) <= 5
    assert len(llm.generate("Once upon a time")) == 1


def test_prompts_as_dicts(llm):
    greedy = SamplingParams(temperature=0, max_tokens=8)
    ids = llm.tokenizer("Once upon")["input_ids"]
    outputs = llm.generate([{"prompt": "Once upon"}, {"prompt_token_ids": ids}], greedy)
    assert outputs[0]["token_ids"] == outputs[1]["token_ids"]


def test_chat(llm):
    greedy = SamplingParams(temperature=0.0, max_tokens=32)
    (output,) = llm.chat(ASK, greedy, use_tqdm=False, chat_template_kwargs=NO_THINKING)
    assert output["text"] == "85"
    outputs = llm.chat([ASK, STORY], sampling_params=greedy, chat_template_kwargs=NO_THINKING)
    assert outputs[0]["text"] == "85" and "fox" in outputs[1]["text"]


def test_streaming(llm):
    greedy = SamplingParams(temperature=0, max_tokens=60)
    expected = llm.chat([ASK, STORY], greedy, chat_template_kwargs=NO_THINKING)
    texts = ["", ""]
    for delta in llm.stream_chat([ASK, STORY], greedy, chat_template_kwargs=NO_THINKING):
        texts[delta["index"]] += delta["text"]
        if delta["finish_reason"] is not None:
            assert delta["finish_reason"] == expected[delta["index"]]["finish_reason"]
    assert texts == [output["text"] for output in expected]


def test_leaving_a_stream_early(llm):
    text = ""
    for delta in llm.stream("Once upon a time", SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)):
        text += delta["text"]
        if len(text) > 40:
            break
    assert llm.is_finished() and llm.stats().num_running == 0


def test_stop_strings(llm):
    params = SamplingParams(temperature=0, max_tokens=200, stop=[".", "!"])
    (output,) = llm.chat(STORY, params, chat_template_kwargs=NO_THINKING)
    assert output["finish_reason"] == "stop" and output["stop_reason"] == "."
    assert "." not in output["text"]
    params = SamplingParams(temperature=0, max_tokens=200, stop=".", include_stop_str_in_output=True)
    (with_stop,) = llm.chat(STORY, params, chat_template_kwargs=NO_THINKING)
    assert with_stop["text"] == output["text"] + "."


def test_stop_tokens_and_special_tokens(llm):
    end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, stop_token_ids=[end])
    (output,) = llm.chat(ASK, params, chat_template_kwargs=NO_THINKING)
    assert (output["text"], output["stop_reason"]) == ("85", end) and output["token_ids"][-1] == end


def test_seeds(llm):
    params = [SamplingParams(temperature=2.0, max_tokens=20, seed=seed, ignore_eos=True) for seed in (1, 2, 1)]
    alone = [llm.generate("Once upon", one)[0]["token_ids"] for one in params]
    together = [output["token_ids"] for output in llm.generate(["Once upon"] * 3, params)]
    assert alone == together
    assert alone[0] == alone[2] != alone[1]


def test_several_samples_of_one_prompt(llm):
    """vLLM's n=4: here the prompt is given four times, and its prefix is computed once."""
    with pytest.raises(TypeError, match=r"\[prompt\] \* n"):
        SamplingParams(n=4)
    outputs = llm.generate(["Once upon a time"] * 4, SamplingParams(temperature=2.0, max_tokens=10, ignore_eos=True))
    assert len({tuple(output["token_ids"]) for output in outputs}) > 1


def test_penalties_and_biases(llm):
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True, repetition_penalty=1.5)
    (output,) = llm.generate("a a a a a a", params)
    (plain,) = llm.generate("a a a a a a", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))
    assert len(set(output["token_ids"])) > len(set(plain["token_ids"]))
    token = llm.tokenizer.convert_tokens_to_ids("fox")
    token = llm.tokenizer("7")["input_ids"][0] if token is None else token
    (biased,) = llm.generate("1 2 3", SamplingParams(temperature=0, max_tokens=5, logit_bias={token: 100}))
    assert biased["token_ids"] == [token] * 5


def test_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=3, prompt_logprobs=2)
    (output,) = llm.chat(ASK, params, chat_template_kwargs=NO_THINKING)
    assert len(output["logprobs"]) == len(output["token_ids"])
    for token_id, position in zip(output["token_ids"], output["logprobs"], strict=True):
        assert len(position) == 3  # the greedy token is one of the three best
        assert next(iter(position)) == token_id and position[token_id].rank == 1
        assert position[token_id].decoded_token == llm.tokenizer.decode([token_id])
        assert math.fsum(math.exp(one.logprob) for one in position.values()) <= 1 + 1e-4
    assert output["prompt_logprobs"][0] is None
    assert len(output["prompt_logprobs"]) == len(output["prompt_token_ids"])
    for token_id, position in zip(output["prompt_token_ids"][1:], output["prompt_logprobs"][1:], strict=True):
        assert token_id in position and 2 <= len(position) <= 3
    deltas = list(llm.stream_chat(ASK, params, chat_template_kwargs=NO_THINKING))
    assert [position for delta in deltas for position in delta["logprobs"]] == output["logprobs"]


def test_metrics(llm):
    (output,) = llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=10, ignore_eos=True))
    metrics = output["metrics"]
    assert 0 <= metrics.queue_time <= metrics.time_to_first_token
    assert metrics.time_per_output_token > 0


def test_the_loop_by_hand(llm):
    request_id = llm.add_request("Once upon a time", SamplingParams(temperature=0, max_tokens=5))
    other = llm.add_request("Once upon a time", SamplingParams(temperature=0, max_tokens=500))
    llm.step()
    assert llm.abort(other)
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert [i for i, _ in finished] == [request_id]
