"""Kinds of prompts, default parameters, chat, statistics, and what an engine says after its end."""

import copy
import json
import logging
import shutil

import numpy as np
import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.engine.stats import EngineStats
from tests.recording import answers, assert_idle, engine
from tests.reference import random_prompt

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm(bundled_model):
    with engine(bundled_model, skip_tokenizer_init=False, kvcache_block_size=16, num_kvcache_blocks=128) as (llm, _):
        yield llm


# ---- prompts


def test_every_kind_of_prompt(llm):
    ids = llm.tokenizer("Once upon")["input_ids"]
    (expected,) = llm.generate("Once upon", GREEDY, use_tqdm=False)
    assert (expected["prompt"], expected["prompt_token_ids"]) == ("Once upon", ids)
    texts = ["Once upon", {"prompt": "Once upon"}, {"prompt": "Once upon", "prompt_token_ids": None}]
    plain_ids = [ids, tuple(ids), np.array(ids), torch.tensor(ids), {"prompt_token_ids": np.array(ids)}]
    both = {"prompt": "what it says", "prompt_token_ids": ids}  # as in vLLM: the ids count, the text is shown
    outputs = llm.generate([*texts, *plain_ids, both], GREEDY, use_tqdm=False)
    assert answers(outputs) == answers([expected]) * 9
    assert [output["prompt"] for output in outputs] == ["Once upon"] * 3 + [None] * 5 + ["what it says"]
    assert all(output["prompt_token_ids"] == ids for output in outputs)
    for one in ({"prompt": "Once upon"}, {"prompt_token_ids": ids}, torch.tensor(ids), np.array(ids)):
        assert answers(llm.generate(one, GREEDY, use_tqdm=False)) == answers([expected])
    assert answers(llm.generate(np.array([ids, ids]), GREEDY, use_tqdm=False)) == answers([expected]) * 2


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({}, "prompt 1 is a dict that holds nothing; give {'prompt': text}"),
        ({"text": "a"}, "prompt 1 is a dict that holds 'text'"),
        (
            {"role": "user", "content": "a"},
            "holds 'role', 'content'; give {'prompt': text} or {'prompt_token_ids': ids}, and conv",
        ),
        ({"prompt": "a", "multi_modal_data": {}}, "holds 'prompt', 'multi_modal_data'"),
        ({"prompt": {"prompt": "a"}}, "must hold text under 'prompt'"),
        ({"prompt_token_ids": "a"}, "ids under 'prompt_token_ids'"),
        ({"prompt_token_ids": [1.5]}, "prompt 1 must be a flat list of integer token ids"),
        (torch.tensor(3), "prompt 1 is a Tensor"),
        (torch.tensor([0.5]), "prompt 1 must be a flat list of integer token ids"),
        (b"text", "prompt 1 is a bytes"),
        ({1, 2}, "prompt 1 is a set"),
    ],
)
def test_dicts_that_are_no_prompts(llm, prompt, message):
    with pytest.raises(TypeError) as caught:
        llm.generate(["fine", prompt], GREEDY, use_tqdm=False)
    assert message in str(caught.value)
    assert_idle(llm)


def test_results_count_cached_tokens(llm):
    llm.reset_prefix_cache()
    prompt = list(range(3, 43))
    (cold,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    (warm,) = llm.generate(prompt, GREEDY, use_tqdm=False)
    assert (cold["num_cached_tokens"], warm["num_cached_tokens"]) == (0, 32)
    assert answers([cold]) == answers([warm])


# ---- default parameters


def with_generation_config(bundled_model, tmp_path, **values):
    shutil.copytree(bundled_model, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").write_text(json.dumps(values))
    return str(tmp_path)


def test_without_parameters_the_checkpoint_says_how_to_sample(llm):
    params = llm.get_default_sampling_params()
    assert params == SamplingParams(temperature=0.6, top_k=20, top_p=0.95)  # generation_config.json of the model
    assert params.max_tokens == 64
    outputs = llm.generate(["Once upon", "Spell"])
    assert all(1 <= len(output["token_ids"]) <= 64 for output in outputs)
    request_id = llm.add_request("Once")
    assert sum(len(delta["token_ids"]) for delta in llm.stream("Once")) > 0
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert [i for i, _ in finished] == [request_id]


def test_do_sample_and_max_new_tokens_of_the_checkpoint_count_for_nothing(bundled_model, tmp_path):
    values = {"do_sample": False, "temperature": 0.5, "top_k": None, "max_new_tokens": 7, "repetition_penalty": 1.5}
    with engine(with_generation_config(bundled_model, tmp_path, **values)) as (llm, _):
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5, repetition_penalty=1.5)


def test_a_default_that_is_wrong_names_the_file_and_harms_nobody_else(bundled_model, tmp_path):
    with engine(with_generation_config(bundled_model, tmp_path, temperature=-1)) as (llm, _):
        with pytest.raises(ValueError, match=r"generation_config\.json: temperature=-1.*pass sampling_params"):
            llm.generate([[1]])
        assert len(llm.generate([[1]], GREEDY, use_tqdm=False)) == 1


def test_no_generation_config_means_plain_defaults(tiny_model, tmp_path):
    shutil.copytree(tiny_model(), tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with engine(str(tmp_path)) as (llm, _):
        assert llm.get_default_sampling_params() == SamplingParams()


# ---- chat

ASK = [{"role": "user", "content": "What is 27 + 58?"}]
SPELL = [{"role": "user", "content": "Spell garden."}]
NO_THINKING = {"enable_thinking": False}


def test_chat_is_generate_on_the_template(llm):
    text = llm.tokenizer.apply_chat_template(ASK, tokenize=False, add_generation_prompt=True, enable_thinking=False)
    assert text.endswith("<think>\n\n</think>\n\n")
    (expected,) = llm.generate(text, GREEDY, use_tqdm=False)
    assert expected["text"] == "85"
    (output,) = llm.chat(ASK, GREEDY, use_tqdm=False, chat_template_kwargs=NO_THINKING)
    assert answers([output]) == answers([expected]) and output["prompt"] == text
    outputs = llm.chat([ASK, SPELL, tuple(ASK)], [GREEDY] * 3, False, chat_template_kwargs=NO_THINKING)
    assert [output["text"] for output in outputs] == ["85", "g-a-r-d-e-n", "85"]
    deltas = list(llm.stream_chat([ASK, SPELL], GREEDY, chat_template_kwargs=NO_THINKING))
    assert "".join(delta["text"] for delta in deltas if delta["index"] == 1) == "g-a-r-d-e-n"
    assert llm.chat([], GREEDY) == []


def test_chat_options(llm):
    begun = [*ASK, {"role": "assistant", "content": "The answer is"}]
    (output,) = llm.chat(begun, GREEDY, add_generation_prompt=False, continue_final_message=True, use_tqdm=False)
    assert output["prompt"].endswith("assistant\nThe answer is")
    (output,) = llm.chat(ASK, GREEDY, add_generation_prompt=False, use_tqdm=False)
    assert output["prompt"].endswith("<|im_end|>\n")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{{ tools[0].name }}{{ extra }}"
    (output,) = llm.chat(
        ASK,
        GREEDY,
        chat_template=template,
        tools=[{"name": "add"}],
        chat_template_kwargs={"extra": "!"},
        use_tqdm=False,
    )
    assert output["prompt"] == "What is 27 + 58?add!"


def test_no_second_bos(bundled_model, tmp_path):
    """A template writes the BOS itself, and the tokenizer would add another one."""
    shutil.copytree(bundled_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer.json"
    raw = json.loads(file.read_text())
    raw["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}},
    }
    file.write_text(json.dumps(raw))
    with engine(str(tmp_path), skip_tokenizer_init=False) as (llm, _):
        assert llm.generate("Hi", GREEDY, use_tqdm=False)[0]["prompt_token_ids"][0] == 0
        template = "<|endoftext|>{{ messages[0].content }}"
        (output,) = llm.chat(ASK, GREEDY, chat_template=template, use_tqdm=False)
        assert output["prompt_token_ids"].count(0) == 1


@pytest.mark.parametrize(
    ("messages", "options", "error", "message"),
    [
        ("Hello", {}, TypeError, 'messages is a str; give a list of {"role"'),
        ([ASK, "Hello"], {}, TypeError, "conversation 1 is a str"),
        ([ASK, []], {}, ValueError, "conversation 1 is empty"),
        ([*ASK, "Hello"], {}, TypeError, "message 1 of conversation 0 is a str"),
        ([{"content": "Hello"}], {}, ValueError, "message 0 of conversation 0 has no role"),
        ([ASK, [{"role": "user"}]], {}, ValueError, "message 0 of conversation 1 has no content"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            {},
            ValueError,
            "a part that is no text ({'type': 'image_url'})",
        ),
        (
            [{"role": "user", "content": ["Hello"]}],
            {},
            ValueError,
            "message 0 of conversation 0 has a part that is no text ('Hello')",
        ),
        ([{"role": "user", "content": b"Hello"}], {}, ValueError, "has a part that is no text (b'Hello')"),
        ([{"role": "user", "content": 5}], {}, ValueError, "has a part that is no text (5)"),
        (ASK, {"continue_final_message": True}, ValueError, "pass add_generation_prompt=False"),
        (ASK, {"chat_template": "{{ raise_exception('no') }}"}, ValueError, "does not take conversation 0 (no)"),
        (ASK, {"chat_template": "{% if %}"}, ValueError, "does not take conversation 0"),
    ],
)
def test_conversations_that_cannot_be_rendered(llm, messages, options, error, message):
    for chat in (llm.chat, llm.stream_chat):
        with pytest.raises(error) as caught:
            chat(messages, GREEDY, **options)
        assert message in str(caught.value)
        assert_idle(llm)


def test_content_in_parts(llm):
    """As OpenAI's API has it: the same prompt as one string, line by line, and the caller's message stays as it is."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "1 2"}, {"type": "text", "text": "3"}]}]
    before = copy.deepcopy(parts)
    outputs = [llm.chat(m, GREEDY, use_tqdm=False)[0] for m in (parts, [{"role": "user", "content": "1 2\n3"}])]
    assert outputs[0]["prompt_token_ids"] == outputs[1]["prompt_token_ids"]
    assert parts == before


def test_a_message_of_tool_calls_alone(llm):
    """OpenAI's clients send None for its content."""
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert llm.chat([*ASK, call, *ASK], GREEDY, use_tqdm=False)[0]["text"] is not None
    with pytest.raises(ValueError, match="message 0 of conversation 0 has no content"):
        llm.chat([{"role": "user", "content": None}], GREEDY)


def test_chat_needs_a_tokenizer_and_a_template(bundled_model, tmp_path):
    with (
        engine(bundled_model) as (llm, _),
        pytest.raises(ValueError, match="chat needs a tokenizer.*skip_tokenizer_init=True.*generate"),
    ):
        llm.chat(ASK, GREEDY)
    shutil.copytree(bundled_model, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    raw = json.loads(file.read_text())
    del raw["chat_template"]
    file.write_text(json.dumps(raw))
    with engine(str(tmp_path), skip_tokenizer_init=False) as (llm, _):
        with pytest.raises(ValueError, match="no chat template; pass chat_template="):
            llm.chat(ASK, GREEDY)
        assert llm.chat(ASK, GREEDY, chat_template="{{ messages[0].content }}", use_tqdm=False)[0]["prompt"]


# ---- the model argument


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [({}, "LLM() needs a model"), ({"model_path": "x"}, "not model_path="), ({"seed": 1}, "needs")],
)
def test_llm_without_a_model_says_what_to_pass(kwargs, message):
    with pytest.raises(TypeError) as caught:
        LLM(**kwargs)
    assert message in str(caught.value) and "LLM('org/name')" in str(caught.value)


def test_the_model_by_keyword(tiny_model):
    with LLM(model=tiny_model(), device="cpu", skip_tokenizer_init=True, num_kvcache_blocks=8) as llm:
        assert len(llm.generate([[1]], GREEDY, use_tqdm=False)[0]["token_ids"]) == 16


# ---- statistics


@pytest.mark.parametrize("overlap", [False, True])
def test_stats(tiny_model, overlap):
    prompts = [random_prompt(40, seed=i) for i in range(4)]
    with engine(tiny_model(), kvcache_block_size=16, num_kvcache_blocks=64, max_num_seqs=2, overlap=overlap) as (
        llm,
        _,
    ):
        assert llm.stats() == EngineStats(0, 0, 64, 0, 0.0, 0, 0, 0, 0, 0, 0, 0, 0.0, 0, 0, 0.0, 0.0)
        for prompt in prompts:
            llm.add_request(prompt, GREEDY)
        assert llm.stats().num_waiting == 4
        llm.step()
        now = llm.stats()
        assert (now.num_running, now.num_waiting) == (2, 2)
        assert now.num_used_blocks == 6 and now.kv_occupancy == 6 / 64
        assert (now.prompt_tokens, now.generated_tokens, now.prefill_steps) == (80, 2, 1)
        assert llm.abort(3)
        while not llm.is_finished():
            llm.step()
        llm.generate(prompts[0], GREEDY, use_tqdm=False)
        end = llm.stats()
        assert (end.num_running, end.num_waiting, end.num_used_blocks, end.kv_occupancy) == (0, 0, 0, 0)
        assert (end.num_finished, end.num_aborted, end.num_preemptions) == (4, 1, 0)
        assert (end.generated_tokens, end.prompt_tokens) == (4 * 16, 3 * 40 + 8)
        assert (end.prefix_cache_queries, end.prefix_cache_hits) == (160, 32)
        assert end.prefix_cache_hit_rate == 0.2
        assert end.decode_steps == 3 * 15 and end.prefill_steps == 3
        assert end.prefill_time > 0 and end.decode_time > 0


def test_stats_while_another_thread_changes_the_queue(llm):
    class Request:
        @property
        def row(self):
            llm.scheduler.waiting.append(self)  # as the thread would that runs `generate`
            return -1

    llm.scheduler.waiting.extend([Request(), Request()])
    try:
        assert llm.stats().num_running == 0
    finally:
        llm.scheduler.waiting.clear()


def thrash(path, num_seqs, caplog):
    caplog.clear()
    with engine(path, kvcache_block_size=16, num_kvcache_blocks=8, max_num_seqs=num_seqs) as (llm, _):
        prompts = [random_prompt(12, seed=i) for i in range(24)]
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=60), use_tqdm=False)
        messages = [record.getMessage() for record in caplog.records]
        return llm.stats().num_preemptions, [message for message in messages if "preemptions" in message]


@pytest.mark.slow
def test_a_cache_that_thrashes_is_reported_with_what_to_do(tiny_model, caplog):
    caplog.set_level(logging.WARNING, "nanovllm")
    preemptions, warnings = thrash(tiny_model(), 8, caplog)
    assert preemptions > 40 and 1 <= len(warnings) <= 4
    for knob in ("num_kvcache_blocks", "gpu_memory_utilization", "max_num_seqs"):
        assert knob in warnings[0]
    preemptions, warnings = thrash(tiny_model(), 1, caplog)
    assert preemptions == 0 and warnings == []


def test_an_ordinary_run_logs_nothing(llm, caplog, capfd):
    llm.generate("Once", GREEDY, use_tqdm=False)
    assert [record for record in caplog.records if record.name == "nanovllm"] == []
    assert capfd.readouterr() == ("", "")


# ---- after the end


def test_what_an_engine_says_after_exit(bundled_model):
    llm = LLM(bundled_model, device="cpu", num_kvcache_blocks=8)
    done = llm.add_request("Once", SamplingParams(temperature=0, max_tokens=1))
    left = llm.add_request("Once", GREEDY)
    llm.step()
    llm.exit()
    for use in (
        lambda: llm.generate("Once", GREEDY),
        lambda: llm.chat(ASK, GREEDY),
        lambda: llm.stream("Once", GREEDY),
        lambda: llm.stream_chat(ASK, GREEDY),
        lambda: llm.add_request("Once", GREEDY),
        llm.step,
        llm.reset_prefix_cache,
    ):
        with pytest.raises(RuntimeError, match="this engine has exited; build a new LLM"):
            use()
    assert llm.is_finished()
    assert not llm.abort(done) and not llm.abort(left)
    stats = llm.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_used_blocks, stats.num_aborted) == (0, 0, 0, 1)
