"""The incremental detokenizer against the tokenizer's own `decode`, on text and on bytes that are none."""

import random
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from nanovllm.engine.detokenizer import REPLACEMENT, Detokenizer, IncrementalDecoder, make_decode, partial_match

TEXT = "Two foxes 🦊🦊 met an owl 🦉. 你好,世界!今天天气很好。 Ünïcödé naïve 👩‍👩‍👧‍👦 \ufffd 𝄞"


@pytest.fixture(scope="module")
def byte_level():
    """A byte-level BPE tokenizer, learnt here: a token for each byte, and a few hundred longer ones."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=special,
        show_progress=False,
    )
    backend.train_from_iterator([TEXT] * 5, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=special)


@pytest.fixture(scope="module")
def bundled(bundled_model):
    return AutoTokenizer.from_pretrained(bundled_model)


@pytest.fixture(scope="module", params=["byte_level", "bundled"])
def tokenizer(request):
    return request.getfixturevalue(request.param)


def bytes_to_ids(tokenizer, data):
    """One token for each byte: the hardest way to say a text."""
    alphabet = {}
    # The byte-level alphabet: printable bytes stand for themselves, the others for 256, 257, ... in order.
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    for byte in range(256):
        alphabet[byte] = chr(byte if byte in printable else next(others))
    return [tokenizer.convert_tokens_to_ids(alphabet[byte]) for byte in data]


def pieces(decode, ids):
    decoder = IncrementalDecoder(decode)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


def check(tokenizer, ids, skip_special_tokens=True):
    decode = make_decode(tokenizer, skip_special_tokens)
    whole = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    assert decode(ids) == whole
    parts = pieces(decode, ids)
    assert "".join(parts) == whole
    return parts


def test_text_comes_in_whole_characters(tokenizer):
    for ids in (tokenizer(TEXT)["input_ids"], bytes_to_ids(tokenizer, TEXT.encode())):
        parts = check(tokenizer, ids)
        # U+FFFD stands in the text once; any other one would be half a character.
        assert "".join(parts).count(REPLACEMENT) == 1
        assert sum(part != "" for part in parts) > 15


@pytest.mark.parametrize("skip", [True, False])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_tokens(tokenizer, skip, data):
    check(tokenizer, data.draw(st.lists(st.integers(0, len(tokenizer) - 1), max_size=80)), skip)


LUMPS = [
    b"\x80",
    b"\xff",
    b"\xe4",
    b"\xf0\x9f",
    b"\xf0\x9f\xa6",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbf\xbd",
    b"\xc0\x80",
]
LUMPS += [b"a", b" ", "你".encode(), "🦊".encode(), "é".encode(), b"\xf4\x90\x80\x80"]


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_any_bytes(byte_level, data):
    """Bytes that are no UTF-8, in long runs too, with special tokens that are skipped in the middle of characters."""
    end = [byte_level.convert_tokens_to_ids("<|end|>")]
    lumps = st.sampled_from([*(bytes_to_ids(byte_level, lump) for lump in LUMPS), end])
    drawn = data.draw(st.lists(st.tuples(lumps, st.integers(1, 40)), max_size=12))
    check(byte_level, [i for lump, times in drawn for i in lump * times])


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=100))
def test_random_bytes(byte_level, data):
    check(byte_level, bytes_to_ids(byte_level, data))


def test_bytes_that_no_token_can_complete_are_not_held_for_ever(byte_level):
    ids = bytes_to_ids(byte_level, b"\x80" * 100)
    shown = 0
    for i, part in enumerate(pieces(make_decode(byte_level, True), ids), 1):
        shown += len(part)
        assert i - shown <= 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["text", "characters in bytes", "no characters", "skipped", "one replacement"])
def test_time_is_linear(byte_level, kind):
    """30,000 tokens take about ten times as long as 3,000, whatever they are: no window that grows with the text."""
    end = byte_level.convert_tokens_to_ids("<|end|>")
    unit = {
        "text": byte_level(TEXT)["input_ids"],
        "characters in bytes": bytes_to_ids(byte_level, "你🦊".encode()),
        "no characters": bytes_to_ids(byte_level, b"\x80"),
        "skipped": [end],
        "one replacement": bytes_to_ids(byte_level, REPLACEMENT.encode()),
    }[kind]
    prefix = bytes_to_ids(byte_level, b"\xe4")  # half a character in front of what is skipped
    longest = [0]
    decode = make_decode(byte_level, True)

    def watched(ids):
        longest[0] = max(longest[0], len(ids))
        return decode(ids)

    def seconds(length):
        ids = (prefix + unit * length)[:length]
        start = perf_counter()
        detokenizer = Detokenizer(watched, ["\n\nnever"])
        for i in ids:
            assert detokenizer.push(i) is None
            detokenizer.take()
        detokenizer.finish()
        assert detokenizer.text == byte_level.decode(ids, skip_special_tokens=True)
        return perf_counter() - start

    seconds(3000)
    assert longest[0] < 64  # what is decoded for one token has a bound
    assert seconds(30_000) < 30 * seconds(3000)


def test_a_cleaning_tokenizer_does_not_clean(byte_level):
    """Spaces before a full stop are what the tokens say, whatever tokenizer_config.json wants to have done to them."""
    byte_level.clean_up_tokenization_spaces = True
    try:
        ids = byte_level("well , yes . do n't")["input_ids"]
        assert make_decode(byte_level, True)(ids) == "well , yes . do n't"
    finally:
        byte_level.clean_up_tokenization_spaces = False


def test_sentencepiece_spaces_and_bytes():
    """The other kind of decoder: it drops the first space, and shows each byte of half a character by itself."""
    vocab = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    vocab |= {piece: 257 + i for i, piece in enumerate(["▁", "▁Hello", "▁world", "s", "!", "▁▁"])}
    backend = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    fox = [byte + 1 for byte in "🦊你".encode()]
    hello, world = vocab["▁Hello"], vocab["▁world"]
    for ids in ([hello, world, vocab["s"], *fox, world], [vocab["▁"], hello, *fox * 20, vocab["!"]], fox[:2], [hello]):
        check(tokenizer, ids)


# ---- stop strings


def run(decode, ids, stop, include=False, min_tokens=0):
    """(text, stop string, number of tokens, deltas) of a completion that ends at a stop string or with its tokens."""
    detokenizer = Detokenizer(decode, stop, include, min_tokens)
    deltas, found = [], None
    for token_id in ids:
        found = detokenizer.push(token_id)
        deltas.append(detokenizer.take())
        if found is not None:
            break
    num_tokens = len(deltas)
    if found is None:
        detokenizer.finish()
        deltas.append(detokenizer.take())
    assert "".join(deltas) == detokenizer.text
    return detokenizer.text, found, num_tokens, deltas


def by_character(ids):
    return "".join(map(chr, ids))


def by_pair(ids):
    return "".join(chr(i // 1000) + chr(i % 1000) for i in ids)


@pytest.mark.parametrize(
    ("text", "stop", "kept", "found"),
    [
        ("aaab", ["aab"], "a", "aab"),
        ("ababac", ["abac"], "ab", "abac"),
        ("xxab", ["abc", "ab"], "xx", "ab"),
        ("xabcy", ["abc", "bc"], "x", "abc"),  # complete at the same place: the earlier in the list
        ("xabcy", ["bc", "abc"], "xa", "bc"),
        ("xabcy", ["abcy", "b"], "xa", "b"),  # complete first
        ("stop", ["stop"], "", "stop"),
        ("sto", ["stop"], "sto", None),  # only the beginning of one: it is given out in the end
        ("aabaab", ["aabaac"], "aabaab", None),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_over_token_boundaries(text, stop, kept, found, include):
    expected = kept + found if include and found else kept
    for decode, ids in (
        (by_character, [ord(c) for c in text]),
        (by_pair, [ord(a) * 1000 + ord(b) for a, b in zip(text[::2], text[1::2], strict=False)]),
    ):
        if decode is by_pair and len(text) % 2:
            continue
        assert run(decode, ids, stop, include)[:2] == (expected, found)


@settings(max_examples=300, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stop=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.sets(st.integers(1, 29)),
    include=st.booleans(),
    min_tokens=st.integers(0, 5),
)
def test_stop_strings_against_a_search_of_the_whole_text(text, stop, cuts, include, min_tokens):
    bounds = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    chunks = [text[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    ids = list(range(len(chunks)))
    shown, found, num_tokens, deltas = run(lambda ids: "".join(chunks[i] for i in ids), ids, stop, include, min_tokens)

    # Plainly: the first end of a match that lies behind the first min_tokens tokens.
    allowed = len("".join(chunks[:min_tokens]))
    ends = [(i + len(s), k, i) for k, s in enumerate(stop) for i in range(len(text)) if text.startswith(s, i)]
    ends = [match for match in ends if match[0] > allowed]
    if not ends:
        assert (shown, found) == (text, None)
    else:
        end, k, start = min(ends)
        assert (shown, found) == (text[: end if include else start], stop[k])
        assert len("".join(chunks[: num_tokens - 1])) < end <= len("".join(chunks[:num_tokens]))
    assert "".join(deltas) == shown  # so nothing was shown that had to be taken back


def test_the_stream_holds_no_more_than_it_must():
    _, _, _, deltas = run(by_character, [ord(c) for c in "a-b--c"], ["--!"])
    assert deltas == ["a", "", "-b", "", "", "--c", ""]


def test_partial_match():
    assert [partial_match("xab", s) for s in ("abc", "b", "ba", "xabx", "y")] == [2, 0, 1, 3, 0]
    rng = random.Random(0)
    for _ in range(200):
        text, stop = ("".join(rng.choices("ab", k=rng.randint(1, 8))) for _ in range(2))
        lengths = [n for n in range(len(stop)) if text.endswith(stop[:n])]
        assert partial_match(text, stop) == max(lengths)
