"""Sequence: derived values, counters, and how small it pickles."""

import pickle

import pytest

from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.sampling_params import SamplingParams


def make(length: int, *, block_size: int = 256, max_tokens: int = 64, temperature: float = 0.5) -> Sequence:
    params = SamplingParams(temperature=temperature)
    return Sequence(7, list(range(length)), params, max_tokens=max_tokens, block_size=block_size, seed=11)


def decode(seq: Sequence, *token_ids: int) -> None:
    """What the scheduler does for a prefill and one decode step per further token."""
    for token_id in token_ids:
        seq.num_scheduled_tokens = seq.num_computed_tokens = seq.num_tokens
        seq.append_token(token_id)


@pytest.mark.parametrize(
    ("length", "num_blocks", "last_block_num_tokens"),
    [(1, 1, 1), (255, 1, 255), (256, 1, 256), (257, 2, 1), (511, 2, 255), (512, 2, 256), (513, 3, 1)],
)
def test_blocks_cover_all_tokens(length: int, num_blocks: int, last_block_num_tokens: int) -> None:
    seq = make(length)
    assert (seq.num_blocks, seq.last_block_num_tokens) == (num_blocks, last_block_num_tokens)
    assert [len(seq.block(i)) for i in range(num_blocks)] == [256] * (num_blocks - 1) + [last_block_num_tokens]
    assert [token for i in range(num_blocks) for token in seq.block(i)] == seq.token_ids


def test_block_knows_its_bounds() -> None:
    seq = make(9, block_size=4)
    assert seq.block(1) == [4, 5, 6, 7]
    for i in (-1, 3):
        with pytest.raises(AssertionError):
            seq.block(i)


def test_prompt_and_completion_stay_apart() -> None:
    prompt = [3, 1, 4]
    seq = Sequence(0, prompt, SamplingParams(), max_tokens=8)
    assert seq.completion_token_ids == []
    decode(seq, 1, 5)
    assert (seq.prompt_token_ids, seq.completion_token_ids) == ([3, 1, 4], [1, 5])
    assert (len(seq), seq.num_prompt_tokens, seq.num_completion_tokens, seq.last_token) == (5, 3, 2, 5)
    assert (seq[0], seq[-2:]) == (3, [1, 5])
    assert prompt == [3, 1, 4], "the caller's list is his own"


def test_a_new_sequence_waits_and_holds_nothing() -> None:
    seq = make(5)
    assert seq.status is SequenceStatus.WAITING and not seq.is_finished and seq.finish_reason is None
    assert (seq.row, seq.block_table, seq.num_cached_tokens, seq.num_computed_tokens) == (-1, [], 0, 0)


@pytest.mark.parametrize(("num_scheduled", "is_last"), [(9, False), (10, False), (11, False), (12, True)])
def test_the_last_token_comes_from_position_prompt_plus_max_tokens_minus_two(num_scheduled: int, is_last: bool) -> None:
    """A prefill of 10 positions yields token 10; computing positions 10 and 11 yields tokens 11 and 12."""
    seq = make(10, max_tokens=3)
    seq.num_scheduled_tokens = num_scheduled
    assert seq.is_last_token_scheduled is is_last


def test_a_decoding_sequence_pickles_small() -> None:
    seq = make(4000)
    decode(seq, *range(100, 110))
    seq.block_table = list(range(16))
    data = pickle.dumps(seq)
    assert len(data) < 1500
    copy = pickle.loads(data)
    assert copy.last_token == 109 and copy.num_tokens == 4010 and copy.num_prompt_tokens == 4000
    assert copy.block_table == seq.block_table and copy.status is seq.status
    assert (copy.seq_id, copy.temperature, copy.max_tokens, copy.seed) == (7, 0.5, 64, 11)


def test_a_sequence_to_be_prefilled_pickles_with_its_ids() -> None:
    seq = make(1000)
    for num_computed in (0, 512, 999, 1000):  # fresh, between chunks, and before its first token is known
        seq.num_computed_tokens = num_computed
        assert pickle.loads(pickle.dumps(seq)).token_ids == seq.token_ids


def test_a_preempted_sequence_pickles_with_its_ids_until_it_decodes_again() -> None:
    seq = make(300)
    decode(seq, *range(300))
    for num_computed in (0, 256, 512):  # 512: past the prompt, and 88 tokens short of the end
        seq.num_computed_tokens = num_computed
        assert pickle.loads(pickle.dumps(seq)).token_ids == seq.token_ids
    decode(seq, 5)
    assert pickle.loads(pickle.dumps(seq)).token_ids == []
