"""Sampling from the tokens that top_k, top_p and min_p leave over.

Tokens stand in one strict order: larger logits first, lower ids first among equal logits. Each filter keeps a beginning
of that order, never an empty one:

- min_p: the logits of at least max + temperature * log(min_p), the tokens min_p times as likely as the likeliest;
- top_k: exactly k of these;
- top_p: the shortest beginning of the rest whose mass reaches top_p of the rest's mass.

So top_k=1 is greedy whatever the ties, and the token that crosses top_p is kept. Among the survivors the choice is the
sampler's: the best logit - temperature * log(E), with noise that depends on no filter.

The masses are float32. Where the mass before a token equals top_p up to rounding, float64 may draw the line one token
earlier or later; nowhere else.
"""

import math
from typing import NamedTuple

import torch

from nanovllm.layers.sampler import exponential_noise

MAX_SCALE = 1e30  # of 1 / temperature, so that a logit's distance of 0 stays 0


class FilterTables(NamedTuple):
    """How each row of the runner's tables is sampled. All [rows], on the logits' device."""

    seeds: torch.Tensor  # int64
    temperatures: torch.Tensor  # float32, 0: greedy
    top_ks: torch.Tensor  # int32, 0: off
    top_ps: torch.Tensor  # float32, 1: off
    log_min_ps: torch.Tensor  # float32, -inf: off


def log_min_p(min_p: float) -> float:
    return math.log(min_p) if min_p > 0 else -math.inf


def filtered_sample(
    logits: torch.Tensor, lines: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, tables: FilterTables
) -> torch.Tensor:
    """Token ids [N] int64 for N rows of logits [B, vocab].

    lines, rows, positions [N] int64: which row of the logits, which row of the tables, and the position of the token to
    be sampled in its sequence.
    """
    if logits.is_cuda:
        from nanovllm.kernels import filtered_sample as kernel

        return kernel.filtered_sample(logits, lines, rows, positions, *tables)
    return filtered_sample_plain(logits, lines, rows, positions, tables)


def filtered_sample_plain(
    logits: torch.Tensor, lines: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, tables: FilterTables
) -> torch.Tensor:
    """The plain form, on any device."""
    logits = logits[lines].float()
    logits = logits.masked_fill(logits.isnan(), -math.inf)
    seeds, temperatures = tables.seeds[rows], tables.temperatures[rows].unsqueeze(1)
    is_greedy = temperatures == 0
    noise = exponential_noise(seeds, positions, logits.shape[-1]).log()
    scores = torch.where(is_greedy, logits, logits - temperatures * noise)
    return scores.masked_fill(~(survivors(logits, rows, tables) | is_greedy), -math.inf).argmax(dim=-1)


def survivors(logits: torch.Tensor, rows: torch.Tensor, tables: FilterTables) -> torch.Tensor:
    """Which tokens of each row may be sampled, [N, vocab] bool, from the float32 logits of these rows [N, vocab]."""
    temperatures, top_ks, top_ps, log_min_ps = (column[rows].unsqueeze(1) for column in tables[1:])
    values, token_ids = logits.sort(dim=-1, descending=True, stable=True)  # equal logits stay in the order of ids
    best, place = values[:, :1], torch.arange(logits.shape[1], device=logits.device)
    kept = values >= best + temperatures * log_min_ps
    kept &= (place < top_ks) | (top_ks == 0)
    masses = ((values - best) * (1 / temperatures).clamp(max=MAX_SCALE)).exp() * kept
    before = masses.cumsum(dim=-1) - masses
    kept &= (before < top_ps * masses.sum(dim=-1, keepdim=True)) | (top_ps == 1)
    kept[:, 0] = True
    return torch.zeros_like(kept).scatter_(1, token_ids, kept)
