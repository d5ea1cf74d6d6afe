"""Picks the next token of each sequence from its logits.

Sampling from softmax(logits / T) needs no softmax: with E_i independent exponential variates, the index that
maximises logits_i - T * log(E_i) has exactly that distribution (the Gumbel-max trick), down to the smallest T. The
variates are a pure function of (seed, position, token id), so a sequence draws the same token alone or in a batch,
chunked, preempted or resumed.
"""

import torch
from torch import nn

_MASK32 = 0xFFFFFFFF


def _mix(x: torch.Tensor) -> torch.Tensor:
    """A bijective scrambling of 32-bit words held in int64 (xor-shift-multiply; constants by C. Wellons, lowbias32)."""
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK32
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK32
    return x ^ (x >> 16)


def exponential_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Exponential variates, a pure function of (seed, position, token id).

    Args:
        seeds: [B] int64, all 64 bits count.
        positions: [B], index in its sequence of the token to be sampled.

    Returns:
        [B, vocab_size] float32. The kernel in `kernels/sample.py` computes the same bits.
    """
    seed_low, seed_high = seeds & _MASK32, (seeds >> 32) & _MASK32
    k0 = _mix(seed_low ^ _mix((positions.long() + 0x9E3779B9) & _MASK32))
    k1 = _mix(seed_high ^ _mix((k0 + 0x85EBCA6B) & _MASK32))
    token_ids = torch.arange(vocab_size, device=seeds.device)
    bits = _mix((_mix(token_ids ^ k0.unsqueeze(1)) + k1.unsqueeze(1)) & _MASK32)
    u = (bits.float() + 0.5) * 2.0**-32
    # The winner is nearly always a tiny variate: near 0 a series keeps the precision that 1 - u would lose.
    series = u * (1.0 + u * (0.5 + u * (1.0 / 3.0)))
    return torch.where(u < 1.0 / 64.0, series, -torch.log(1.0 - u))


class Sampler(nn.Module):
    """Rows of temperature 0 take the exact argmax (the lowest id on a tie), the rest the exponential-noise argmax."""

    def forward(
        self,
        logits: torch.Tensor,
        temperatures: torch.Tensor,
        seeds: torch.Tensor,
        positions: torch.Tensor,
        all_greedy: bool = False,
    ) -> torch.Tensor:
        """Token ids [B] int64 from logits [B, vocab], temperatures [B] float32, seeds [B] int64, positions [B].

        A position is the index that the new token will have in its sequence.

        `all_greedy` is the host's knowledge that every temperature is 0; it saves the plain path the noise.
        """
        if logits.is_cuda:
            from nanovllm.kernels.sample import sample

            return sample(logits, temperatures, seeds, positions)
        if all_greedy:
            return logits.argmax(dim=-1)
        return self.sample(logits, temperatures, seeds, positions)

    @staticmethod
    def sample(
        logits: torch.Tensor, temperatures: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        """The plain form, on any device."""
        is_greedy = (temperatures == 0).unsqueeze(1)
        logits = logits.float()
        noise = exponential_noise(seeds, positions, logits.shape[-1]).log()
        return torch.where(is_greedy, logits, logits - temperatures.unsqueeze(1) * noise).argmax(dim=-1)
