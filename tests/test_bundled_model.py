"""The trained model that comes with the project: text in, text out, and what it has learnt.

Its prompts of 1 to 513 tokens, on every path through the engine, are in test_parity.py.
"""

import random

import pytest

from nanovllm import LLM, SamplingParams
from tests.recording import engine
from tests.reference import assert_decisive, reference_generate, training_script

GREEDY = SamplingParams(temperature=0, max_tokens=160)
VARIED = ["Introduce yourself.", "Tell me a story about a fox.", "Tell me a story about an owl."]
SHORT = ["What is 27 + 58?", "What is the capital of Norway?", "Spell garden.", "List all prime numbers within 100."]


def render(llm: LLM, question: str, **kwargs: object) -> str:
    messages = [{"role": "user", "content": question}]
    return llm.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs)


@pytest.fixture(scope="module")
def llm(bundled_model):
    with engine(bundled_model, skip_tokenizer_init=False) as (llm, _):
        yield llm


@pytest.mark.parametrize("enable_thinking", [pytest.param(True, marks=pytest.mark.slow), False])
def test_chat_equals_transformers(llm, bundled_model, enable_thinking):
    prompts = [render(llm, question, enable_thinking=enable_thinking) for question in VARIED + SHORT]
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    for question, prompt, output in zip(VARIED + SHORT, prompts, outputs, strict=True):
        ids = llm.tokenizer(prompt)["input_ids"]
        reference = reference_generate(bundled_model, ids, GREEDY.max_tokens, eos=(llm.tokenizer.eos_token_id,))
        assert_decisive(reference, min_distinct=None if question in VARIED else 3)
        assert output["token_ids"] == reference.token_ids
        assert output["finish_reason"] == "stop"


def test_it_answers(llm):
    questions = ["What is 27 + 58?", "What is the capital of France?", "What day comes after Monday?"]
    outputs = llm.generate([render(llm, question) for question in questions], GREEDY, use_tqdm=False)
    assert [output["text"] for output in outputs] == [
        "85",
        "The capital of France is Paris.",
        "Tuesday comes after Monday.",
    ]


def test_sums_that_it_never_saw(llm):
    """At least 95 % of 300 held-out sums, in every phrasing, digit by digit, and then the end of the turn."""
    script = training_script()
    pairs = [(a, b) for a in range(100) for b in range(100) if script.is_held_out(a, b)]
    assert sum(a <= b for a, b in pairs) >= 5050 / 5, "too few unordered pairs are held out"
    assert all((b, a) in pairs for a, b in pairs[:200])
    chosen = random.Random(0).sample(pairs, 300)
    phrasings = [script.SUM_PHRASINGS[i % len(script.SUM_PHRASINGS)] for i in range(len(chosen))]
    prompts = [
        render(llm, phrasing.format(a=a, b=b), enable_thinking=i % 2 == 0)
        for i, (phrasing, (a, b)) in enumerate(zip(phrasings, chosen, strict=True))
    ]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    end = llm.tokenizer.convert_tokens_to_ids("<|im_end|>")
    correct = [
        output["text"] == str(a + b) and output["token_ids"][-1] == end and output["finish_reason"] == "stop"
        for output, (a, b) in zip(outputs, chosen, strict=True)
    ]
    assert sum(correct) >= 0.95 * len(correct), f"{sum(correct)} of {len(correct)}"


def test_eos_ids_of_generation_config_and_tokenizer(llm):
    tokens = ("<|im_end|>", "<|endoftext|>")
    assert llm.scheduler.eos_token_ids == set(llm.tokenizer.convert_tokens_to_ids(tokens))


def test_text_leaves_out_special_tokens_and_token_ids_keep_them(llm):
    (output,) = llm.generate(render(llm, "Spell garden."), GREEDY, use_tqdm=False)
    assert output["text"] == "g-a-r-d-e-n"
    assert llm.tokenizer.decode(output["token_ids"]) == "g-a-r-d-e-n<|im_end|>"
    (output,) = llm.generate(
        render(llm, "Spell garden."), SamplingParams(temperature=0, max_tokens=40, ignore_eos=True), use_tqdm=False
    )
    assert output["finish_reason"] == "length" and len(output["token_ids"]) == 40
    assert "<|" not in output["text"] and output["text"].startswith("g-a-r-d-e-n")
