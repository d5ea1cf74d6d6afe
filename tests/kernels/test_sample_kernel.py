"""The sampling kernel: exact greedy, and noise that is bit for bit the documented function of its keys."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nanovllm.kernels.sample import CHUNK, sample

SEEDS = [0, 1, -1, 2**63 - 1, -(2**63), 12345678901234]
POSITIONS = [0, 1, 255, 256, 131071, 3]


def reference_noise(seed: int, position: int, vocab_size: int) -> np.ndarray:
    """The exponential variates of one row, [V] float64, from uint32 arithmetic as documented."""

    def mix(x: np.ndarray) -> np.ndarray:
        x = x ^ (x >> np.uint32(16))
        x = x * np.uint32(0x7FEB352D)
        x = x ^ (x >> np.uint32(15))
        x = x * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    def u32(value: int) -> np.ndarray:
        return np.array([value % 2**32], dtype=np.uint32)

    key0 = mix(u32(seed) ^ mix(u32(position) + u32(0x9E3779B9)))
    key1 = mix(u32(seed >> 32) ^ mix(key0 + u32(0x85EBCA6B)))
    bits = mix(mix(np.arange(vocab_size, dtype=np.uint32) ^ key0) + key1)
    v = (bits.astype(np.float32) + np.float32(0.5)).astype(np.float64) * 2.0**-32
    with np.errstate(divide="ignore"):
        return -np.log1p(-v)


def rows(*values: float, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@pytest.mark.parametrize("vocab_size", [1, 17, CHUNK, CHUNK + 1, 3 * CHUNK - 5])
def test_temperature_0_is_the_exact_argmax(
    vocab_size: int, dtype: torch.dtype, device: torch.device, randn: Callable[..., torch.Tensor]
) -> None:
    logits = randn(4, vocab_size + 3, dtype=dtype)[:, :vocab_size]  # strided rows; the neighbours are not the row's
    zeros = rows(0, 0, 0, 0, dtype=torch.float32, device=device)
    seeds, positions = (rows(1, 2, 3, 4, dtype=torch.int64, device=device) for _ in range(2))
    ids = sample(logits, zeros, seeds, positions)
    assert ids.dtype == torch.int64
    expected = [row.index(max(row)) for row in logits.tolist()]  # the lowest id that has the largest logit
    assert ids.tolist() == expected


def test_lowest_id_wins_a_tie_within_and_across_chunks(device: torch.device) -> None:
    logits = torch.zeros(3, 2 * CHUNK + 9, device=device)
    logits[0, [5, 9, CHUNK + 3]] = 1.0
    logits[1, [CHUNK - 1, CHUNK, 2 * CHUNK]] = 1.0
    ids = sample(
        logits,
        torch.zeros(3, device=device),
        torch.zeros(3, dtype=torch.int64, device=device),
        torch.zeros(3, dtype=torch.int32, device=device),
    )
    assert ids.tolist() == [5, CHUNK - 1, 0]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_ids_are_those_of_the_documented_noise(
    temperature: float, device: torch.device, randn: Callable[..., torch.Tensor]
) -> None:
    vocab_size = CHUNK + 100
    logits = randn(len(SEEDS), vocab_size, dtype=torch.float32)
    ids = sample(
        logits,
        torch.full((len(SEEDS),), temperature, device=device),
        rows(*SEEDS, dtype=torch.int64, device=device),
        rows(*POSITIONS, dtype=torch.int32, device=device),
    ).tolist()
    for row, (seed, position) in enumerate(zip(SEEDS, POSITIONS, strict=True)):
        scores = logits[row].double().cpu().numpy() / temperature
        scores -= np.log(reference_noise(seed, position, vocab_size))
        second, best = np.sort(scores)[-2:]
        assert best - second > 1e-4, "choose other seeds: this row is too close for float32"
        assert ids[row] == int(scores.argmax())


def test_noise_decides_bit_for_bit(device: torch.device) -> None:
    """On flat logits the winner is the token of the smallest variate, whichever of thousands it is."""
    vocab_size, num_rows = 3 * CHUNK, 8
    ids = sample(
        torch.zeros(num_rows, vocab_size, device=device),
        torch.ones(num_rows, device=device),
        torch.arange(num_rows, device=device) * 2**33 - 5,
        torch.arange(num_rows, device=device) * 1000,
    ).tolist()
    for row in range(num_rows):
        noise = reference_noise(row * 2**33 - 5, row * 1000, vocab_size)
        best, second = np.sort(noise)[:2]
        assert second / best > 1.0001, "choose other seeds: this row is too close for float32"
        assert ids[row] == int(noise.argmin())
    assert len(set(ids)) > num_rows // 2


def test_equals_the_torch_sampler(device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    sampler = pytest.importorskip("nanovllm.layers.sampler")
    vocab_size = CHUNK + 37
    logits = randn(len(SEEDS), vocab_size, dtype=torch.float32)
    seeds = rows(*SEEDS, dtype=torch.int64, device=device)
    positions = rows(*POSITIONS, dtype=torch.int64, device=device)
    noise = sampler.exponential_noise(seeds, positions, vocab_size)
    reference = np.stack([reference_noise(*key, vocab_size) for key in zip(SEEDS, POSITIONS, strict=True)])
    np.testing.assert_allclose(noise.cpu().numpy(), reference, rtol=1e-4)
    ids = sample(logits, torch.full((len(SEEDS),), 0.8, device=device), seeds, positions)
    assert ids.tolist() == (logits / 0.8 - noise.log()).argmax(dim=-1).tolist()


def test_a_row_is_the_same_alone_and_in_a_batch(device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    logits = randn(4, 500, dtype=torch.float32)
    temperatures = rows(0.0, 0.7, 0.0, 1.3, dtype=torch.float32, device=device)
    seeds = rows(7, 7, 8, 8, dtype=torch.int64, device=device)
    positions = rows(1, 2, 3, 4, dtype=torch.int64, device=device)
    together = sample(logits, temperatures, seeds, positions)
    alone = [
        sample(logits[i : i + 1], temperatures[i : i + 1], seeds[i : i + 1], positions[i : i + 1]) for i in range(4)
    ]
    assert together.tolist() == torch.cat(alone).tolist()
    assert together[[0, 2]].tolist() == logits[[0, 2]].argmax(dim=-1).tolist()


@pytest.mark.slow
def test_draws_follow_the_softmax(device: torch.device) -> None:
    """120 positions of one seed over 5 tokens: chi-square of 4 degrees of freedom is below 18.5 in 99.9 % of cases."""
    num_draws = 120
    logits = rows(0.0, 1.0, 2.0, 0.5, float("-inf"), 1.5, dtype=torch.float32, device=device)
    ids = sample(
        logits.expand(num_draws, -1),
        torch.full((num_draws,), 2.0, device=device),
        torch.full((num_draws,), 42, device=device),
        torch.arange(num_draws, device=device),
    )
    counts = torch.bincount(ids, minlength=6).double().cpu()
    expected = (logits / 2.0).softmax(dim=-1).double().cpu() * num_draws
    assert counts[4] == 0
    possible = expected > 0
    assert (((counts - expected) ** 2 / expected)[possible]).sum() < 18.5


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_never_wins_and_ids_stay_in_range(temperature: float, device: torch.device) -> None:
    logits = torch.full((3, 70), float("nan"), device=device)
    logits[1, 33] = -5.0
    logits[2] = float("-inf")
    zeros = torch.zeros(3, dtype=torch.int64, device=device)
    ids = sample(logits, torch.full((3,), temperature, device=device), zeros, zeros)
    assert ids.tolist() == [0, 33, 0]
