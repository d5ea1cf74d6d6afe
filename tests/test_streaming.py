"""Streaming, stop strings and aborts, from outside; overlap on and off, since a stop string is seen one step late."""

import gc
import threading
import time

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine.outputs import Request
from tests.recording import assert_idle, engine
from tests.reference import random_prompt
from tests.test_bundled_model import render

GREEDY = SamplingParams(temperature=0, max_tokens=40)
QUESTIONS = ["Introduce yourself.", "Tell me a story about a fox.", "What is 27 + 58?", "Spell garden."]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "overlap"])
def llm(request, bundled_model):
    # Two sequences at a time and prompts in chunks, so that requests wait, are half-prefilled, and run.
    settings = {"overlap": request.param, "max_num_seqs": 2, "max_num_batched_tokens": 16, "num_kvcache_blocks": 8}
    with engine(bundled_model, skip_tokenizer_init=False, **settings) as (llm, _):
        yield llm


@pytest.fixture(autouse=True)
def left_idle(llm):
    yield
    assert_idle(llm)


@pytest.fixture(scope="module")
def prompts(llm):
    return [render(llm, question) for question in QUESTIONS]


@pytest.fixture(scope="module")
def whole(llm, prompts):
    return llm.generate(prompts, GREEDY, use_tqdm=False)


def gather(deltas, num_prompts):
    """The deltas of each prompt put together, as `generate` returns them."""
    outputs = [{"text": "", "token_ids": [], "finish_reason": None, "stop_reason": None} for _ in range(num_prompts)]
    for delta in deltas:
        output = outputs[delta["index"]]
        assert output["finish_reason"] is None, "something came after the end"
        output["text"] += delta["text"]
        output["token_ids"] += delta["token_ids"]
        output["finish_reason"], output["stop_reason"] = delta["finish_reason"], delta["stop_reason"]
    return outputs


def same(outputs, keys=("text", "token_ids", "finish_reason", "stop_reason")):
    return [{key: output[key] for key in keys} for output in outputs]


# ---- streaming


def test_deltas_joined_are_what_generate_returns(llm, prompts, whole):
    deltas = list(llm.stream(prompts, GREEDY))
    assert gather(deltas, len(prompts)) == same(whole)
    assert all(len(delta["token_ids"]) == 1 for delta in deltas)
    assert {delta["index"] for delta in deltas} == set(range(len(prompts)))
    # The second prompt's text has come before the first one's was complete.
    last_of_first = max(i for i, delta in enumerate(deltas) if delta["index"] == 0)
    assert any(delta["index"] == 1 and delta["text"] for delta in deltas[:last_of_first])


def test_one_prompt_and_none(llm, prompts, whole):
    assert gather(llm.stream(prompts[0], GREEDY), 1) == same(whole[:1])
    assert list(llm.stream([], GREEDY)) == []


def test_mistakes_are_raised_by_the_call_and_work_begins_with_the_first_delta(llm, prompts):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        llm.stream([prompts[0], ""], GREEDY)
    stream = llm.stream(prompts, GREEDY)
    assert_idle(llm)
    next(stream)
    assert not llm.is_finished()
    stream.close()


def test_parameters_that_change_before_the_first_delta_are_the_callers_own(llm, prompts, whole):
    params = SamplingParams(temperature=0, max_tokens=4, stop=["never"])
    stream = llm.stream(prompts[1], params)
    params.max_tokens, params.logprobs = 0, 5
    params.stop.append(whole[1]["text"][0])
    (output,) = gather(stream, 1)
    assert (output["token_ids"], output["finish_reason"]) == (whole[1]["token_ids"][:4], "length")


@pytest.mark.parametrize("num_deltas", [1, 2, 5, 30])
def test_leaving_the_loop_aborts_what_is_left(llm, prompts, whole, num_deltas):
    for i, _ in enumerate(llm.stream(prompts, GREEDY), 1):
        if i == num_deltas:
            break
    assert_idle(llm)
    assert llm.step() == ([], 0)
    assert same(llm.generate(prompts, GREEDY, use_tqdm=False)) == same(whole)


def test_an_exception_in_the_loop_aborts_what_is_left(llm, prompts):
    with pytest.raises(KeyError):
        for _ in llm.stream(prompts, GREEDY):
            raise KeyError
    assert_idle(llm)


def test_a_stream_that_is_left_in_the_middle_spares_other_requests(llm, prompts, whole):
    queued = llm.add_request(prompts[1], GREEDY)
    for delta in llm.stream(prompts[:1], GREEDY):
        if len(delta["text"]) > 3:
            break
    finished = []
    while not llm.is_finished():
        finished += llm.step()[0]
    assert finished == [(queued, whole[1]["token_ids"])]


def test_everything_else_works_between_two_deltas(llm, prompts, whole):
    stream = llm.stream(prompts[:2], GREEDY)
    deltas = [next(stream)]
    queued = llm.add_request(prompts[2], GREEDY)
    assert same(llm.generate(prompts[3], GREEDY, use_tqdm=False)) == same(whole[3:])
    assert gather(llm.stream(prompts[2], GREEDY), 1) == same(whole[2:3])
    finished = llm.step()[0]
    deltas += stream
    assert gather(deltas, 2) == same(whole[:2])
    # While the others ran, tokens of this stream have gathered.
    assert max(len(delta["token_ids"]) for delta in deltas) > 1
    while not llm.is_finished():
        finished += llm.step()[0]
    assert finished == [(queued, whole[2]["token_ids"])]


def test_a_stream_that_the_garbage_collector_closes_in_the_middle_of_a_step(llm, prompts, whole, monkeypatch):
    """Nothing may change hands inside a step: the stream's requests end before the next one."""
    holder = [llm.stream(prompts[:2], GREEDY)]
    next(holder[0])
    postprocess = llm.scheduler.postprocess

    def collecting(*args):
        holder.clear()
        gc.collect()
        return postprocess(*args)

    monkeypatch.setattr(llm.scheduler, "postprocess", collecting)
    assert same(llm.generate(prompts[2:], GREEDY, use_tqdm=False)) == same(whole[2:])


def test_whole_characters_only(llm):
    """At high temperature the model writes bytes that are no text: what is shown is never taken back."""
    params = SamplingParams(temperature=8.0, max_tokens=80, ignore_eos=True, seed=5)
    deltas = list(llm.stream(["fox", "owl"], params))
    expected = llm.generate(["fox", "owl"], params, use_tqdm=False)
    assert gather(deltas, 2) == same(expected)
    assert any("\ufffd" in output["text"] for output in expected), "choose another seed"


def test_without_a_tokenizer_ids_are_streamed_and_stop_strings_refused(tiny_model):
    with engine(tiny_model()) as (llm, _):
        expected = llm.generate([[1, 2], [3]], GREEDY, use_tqdm=False)
        assert gather(llm.stream([[1, 2], [3]], GREEDY), 2) == same(expected)
        for call in (llm.generate, llm.stream, lambda p, s: llm.add_request(p[0], s[1])):
            with pytest.raises((ValueError, TypeError)):
                call([[1], [2]], [GREEDY, 5])
        with pytest.raises(ValueError, match=r"stop=\['x'\] of prompt 1 needs a tokenizer.*stop_token_ids"):
            llm.generate([[1], [2]], [GREEDY, SamplingParams(stop="x")], use_tqdm=False)


# ---- stop strings


def stop_at(prompt_output, text):
    """How many tokens of an output hold the text up to and with the first `text`."""
    return prompt_output["text"].index(text) + len(text)


def test_stop_strings_cut_the_text_and_keep_the_tokens(llm, prompts, whole):
    decode = llm.tokenizer.decode
    for output, prompt in zip(whole, prompts, strict=True):
        text = output["text"]
        stop = text[len(text) // 2 : len(text) // 2 + 3]
        end = text.index(stop) + len(stop)
        for include in (False, True):
            params = SamplingParams(temperature=0, max_tokens=40, stop=[stop, "@@"], include_stop_str_in_output=include)
            (cut,) = llm.generate(prompt, params, use_tqdm=False)
            assert cut["text"] == text[: end if include else end - len(stop)]
            assert (cut["finish_reason"], cut["stop_reason"]) == ("stop", stop)
            ids = cut["token_ids"]
            assert ids == output["token_ids"][: len(ids)]
            # Up to the token that completed it, and no further.
            assert stop in decode(ids) and stop not in decode(ids[:-1])
            assert gather(llm.stream(prompt, params), 1) == same([cut])


def test_stop_strings_side_by_side_with_requests_that_have_none(llm, prompts, whole):
    stops = [None, "fox", None, ["-", "g"]]
    params = [SamplingParams(temperature=0, max_tokens=40, stop=stop) for stop in stops]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert same(outputs[::2]) == same(whole[::2])
    assert outputs[1]["stop_reason"] == "fox" and outputs[1]["text"] == whole[1]["text"].split("fox")[0]
    assert outputs[3]["stop_reason"] == "g" and outputs[3]["text"] == ""


def test_a_stop_string_that_never_comes_changes_nothing(llm, prompts, whole):
    params = SamplingParams(temperature=0, max_tokens=40, stop=["never", "\n\n\n\n"])
    assert same(llm.generate(prompts, params, use_tqdm=False)) == same(whole)


def test_a_stop_string_in_the_last_token_allowed_is_a_stop(llm, prompts, whole):
    (output,) = llm.generate(prompts[1], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
    assert output["finish_reason"] == "length"
    stop = output["text"][-4:]
    assert stop not in output["text"][:-1], "choose another length"
    (cut,) = llm.generate(prompts[1], SamplingParams(temperature=0, max_tokens=5, stop=stop), use_tqdm=False)
    assert (cut["text"], cut["finish_reason"], cut["stop_reason"]) == (output["text"][:-4], "stop", stop)


def test_min_tokens_suppresses_earlier_stop_strings(llm, prompts, whole):
    text, ids = whole[1]["text"], whole[1]["token_ids"]
    stop = next(c for c in text if text.count(c) > 3)
    for min_tokens in (0, 5, 10, 20):
        params = SamplingParams(temperature=0, max_tokens=40, stop=stop, min_tokens=min_tokens)
        (output,) = llm.generate(prompts[1], params, use_tqdm=False)
        start = len(llm.tokenizer.decode(ids[:min_tokens], skip_special_tokens=True))
        assert output["text"] == text[: text.index(stop, start)]
        assert len(output["token_ids"]) > min_tokens


def test_stop_tokens_and_eos_are_no_part_of_the_text(llm, prompts, whole):
    (full,) = (output for output in whole if output["text"] == "g-a-r-d-e-n")
    end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert (full["token_ids"][-1], full["finish_reason"], full["stop_reason"]) == (end, "stop", None)
    dash = full["token_ids"][1]
    for params, text, ids, reason in (
        ({"stop_token_ids": [dash]}, "g", full["token_ids"][:2], dash),
        ({"stop_token_ids": [dash], "include_stop_str_in_output": True}, "g-", full["token_ids"][:2], dash),
        ({"skip_special_tokens": False}, "g-a-r-d-e-n", full["token_ids"], None),
        (
            {"skip_special_tokens": False, "include_stop_str_in_output": True},
            "g-a-r-d-e-n<|im_end|>",
            full["token_ids"],
            None,
        ),
    ):
        params = SamplingParams(temperature=0, max_tokens=40, **params)
        (output,) = llm.generate(prompts[3], params, use_tqdm=False)
        expected = [{"text": text, "token_ids": ids, "finish_reason": "stop", "stop_reason": reason}]
        assert same([output]) == expected
        assert gather(llm.stream(prompts[3], params), 1) == expected


# ---- abort


def test_abort_in_every_state(llm, prompts, whole):
    """Waiting, half-prefilled, running with a step in flight, ended, reported: the others never notice."""
    for num_steps in (0, 1, 2, 5, 13, 34):
        ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        finished = []
        for _ in range(num_steps):
            finished += llm.step()[0]
        ended = dict(finished)
        for victim in (0, 2):
            was_live = ids[victim] in llm._requests
            assert llm.abort(ids[victim]) is was_live
            assert llm.abort(ids[victim]) is False
            assert was_live or ids[victim] in ended or llm._unreported
            llm.scheduler.check_invariants()
        while not llm.is_finished():
            finished += llm.step()[0]
        reported = dict(finished)
        for i, request_id in enumerate(ids):
            if i in (1, 3):
                assert reported[request_id] == whole[i]["token_ids"]
            else:
                assert (request_id in reported) == (request_id in ended)


def test_pitfall_29_abort_everything_and_step(llm, prompts):
    for num_steps in (0, 1, 3, 6):
        ids = [llm.add_request(prompt, GREEDY) for prompt in prompts]
        for _ in range(num_steps):
            llm.step()
        assert all(llm.abort(request_id) for request_id in ids)
        assert_idle(llm)
        assert llm.step() == ([], 0)


def test_abort_in_the_middle_of_a_stream(llm, prompts, whole):
    deltas, seen = [], 0
    for delta in llm.stream(prompts, GREEDY):
        deltas.append(delta)
        seen += delta["index"] == 1
        if seen == 5 and delta["index"] == 1:
            assert llm.abort(delta["request_id"])
            assert not llm.abort(delta["request_id"])
    outputs = gather(deltas, 4)
    assert same(outputs[:1] + outputs[2:]) == same(whole[:1] + whole[2:])
    assert outputs[1]["finish_reason"] == "abort"
    assert outputs[1]["token_ids"] == whole[1]["token_ids"][: len(outputs[1]["token_ids"])]
    assert whole[1]["text"].startswith(outputs[1]["text"]) and outputs[1]["text"]
    assert [d["finish_reason"] for d in deltas if d["index"] == 1][-2:] == [None, "abort"]


def test_abort_of_a_request_whose_delta_of_the_same_step_is_still_to_come(llm, prompts, whole):
    deltas, both = [], False
    for delta in llm.stream(prompts[:2], GREEDY):
        deltas.append(delta)
        both = both or delta["index"] == 1
        if both and delta["index"] == 0:
            llm.abort(delta["request_id"] + 1)
    outputs = gather(deltas, 2)
    assert same(outputs[:1]) == same(whole[:1])
    assert outputs[1]["finish_reason"] == "abort"


def test_an_abort_in_another_thread_refuses_the_engine_to_nobody(llm, prompts, whole, monkeypatch):
    """It has the engine for a moment, in which a stream may come for its next step."""
    stream = llm.stream(prompts[:2], GREEDY)
    first = next(stream)
    inside, abort_pending = threading.Event(), llm._abort_pending

    def slowly():
        if threading.current_thread() is thread:
            inside.set()
            time.sleep(0.1)
        abort_pending()

    monkeypatch.setattr(llm, "_abort_pending", slowly)
    thread = threading.Thread(target=llm.abort, args=(first["request_id"] + 1,))
    thread.start()
    assert inside.wait(30)
    outputs = gather([first, *stream], 2)
    thread.join()
    assert same(outputs[:1]) == same(whole[:1])
    assert outputs[1]["finish_reason"] == "abort"


def test_abort_from_another_thread_ends_a_generate(llm, prompts):
    first, done = threading.Event(), []
    follow = Request.follow

    def watch(request):
        first.set()
        return follow(request)

    def cancel():
        first.wait(30)
        done.append(llm.abort(llm._num_ids - 1))

    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True, stop="never")
    thread = threading.Thread(target=cancel)
    thread.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "follow", watch)
        outputs = llm.generate(prompts[:2], [GREEDY, params], use_tqdm=False)
    thread.join()
    assert done == [True]
    assert [output["finish_reason"] for output in outputs] == ["length", "abort"]
    assert 0 < len(outputs[1]["token_ids"]) < 2000


@pytest.mark.parametrize("bad", [-1, 10**9])
def test_an_id_that_was_never_given_out_is_refused(llm, prompts, bad):
    llm.generate(prompts[2], GREEDY, use_tqdm=False)
    with pytest.raises(ValueError, match=f"request_id={bad} was never given out by this engine.*from 0 to"):
        llm.abort(bad)
    with pytest.raises(TypeError, match="request_id='0' must be an integer"):
        llm.abort("0")


def test_preempted_requests_stream_and_stop_too(tiny_model, bundled_model):
    """A pool too small for what runs: streams of requests that are computed again hold every token once."""
    prompts = [random_prompt(20, seed=i) for i in range(6)]
    params = SamplingParams(temperature=0, max_tokens=30)
    for overlap in (False, True):
        settings = {"kvcache_block_size": 16, "num_kvcache_blocks": 9, "overlap": overlap}
        with engine(tiny_model(), **settings) as (llm, _):
            expected = llm.generate(prompts, params, use_tqdm=False)
            assert gather(llm.stream(prompts, params), 6) == same(expected)
            assert llm.scheduler.num_preemptions > 0
            for i, _ in enumerate(llm.stream(prompts, params)):
                if i == 90:
                    break
            assert_idle(llm)


def test_a_stream_after_exit_says_so(bundled_model):
    llm = LLM(bundled_model, device="cpu", num_kvcache_blocks=8)
    stream = llm.stream("Once", GREEDY)
    next(stream)
    llm.exit()
    assert [(delta["token_ids"], delta["finish_reason"]) for delta in stream] == [([], "abort")]
    with pytest.raises(RuntimeError, match="exited; build a new LLM"):
        llm.stream("Once", GREEDY)
