"""The filtering kernel on tiny blocks: the survivors are those of the reference, whatever way it takes to find them."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from nanovllm.kernels import filtered_sample as kernel
from nanovllm.kernels.sample import sample
from nanovllm.layers.filters import FilterTables, filtered_sample_plain, log_min_p
from tests.filter_reference import reference_survivors

BLOCK = 32
Filter = tuple[float, int, float, float]  # temperature, top_k, top_p, min_p


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "BLOCK", BLOCK)
    monkeypatch.setattr(kernel, "CAPACITY", 2 * BLOCK)
    monkeypatch.setattr(kernel, "NUM_WARPS", 1)


Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor, FilterTables]  # lines, rows, positions, tables


def rows_of(filters: list[Filter], device: torch.device, lines: list[int] | None = None) -> Rows:
    """One row per filter, each with a seed and a position of its own."""
    temperatures, top_ks, top_ps, min_ps = zip(*filters, strict=True)
    n = len(filters)

    def column(values: object, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    tables = FilterTables(
        seeds=column([i * 2**33 + 5 for i in range(n)], torch.int64),
        temperatures=column(temperatures),
        top_ks=column(top_ks, torch.int32),
        top_ps=column(top_ps),
        log_min_ps=column([log_min_p(p) for p in min_ps]),
    )
    order = list(range(n))
    return (*(column(x, torch.int64) for x in (lines or order, order, [100 + i for i in order])), tables)


def draw(logits: torch.Tensor, rows: Rows) -> list[int]:
    return kernel.filtered_sample(logits, *rows[:3], *rows[3]).tolist()


FILTERS: list[Filter] = [
    (0.7, 5, 1.0, 0.0),
    (1.0, BLOCK + 1, 1.0, 0.0),  # more than there are maxima to bound it by
    (1.3, 0, 0.95, 0.0),
    (1.0, 0, 1.0, 0.3),
    (0.6, 20, 0.95, 0.0),
    (1.0, 12, 0.6, 0.1),
    (0.0, 5, 0.5, 0.5),
    (1.0, 0, 0.9999999, 0.0),
]


def logits_of(
    kind: str, n: int, vocab_size: int, dtype: torch.dtype, randn: Callable[..., torch.Tensor]
) -> torch.Tensor:
    logits = randn(n, vocab_size, dtype=torch.float32)
    logits = {
        "random": lambda: 2 * logits,
        "negative": lambda: logits - 20,
        "peaked": lambda: logits.sign() * logits.abs() ** 4,
        "tied": lambda: logits.round(),
        "flat": lambda: torch.zeros_like(logits),
        "signed zeros": lambda: torch.zeros_like(logits).copysign(logits),
        "mostly banned": lambda: logits.masked_fill(logits < 1, float("-inf")),
    }[kind]()
    return logits.to(dtype)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, torch.bfloat16) for kind in ("random", "tied", "flat")]
    + [
        pytest.param(kind, dtype, marks=pytest.mark.slow)
        for kind, dtype in (
            ("negative", torch.bfloat16),
            ("signed zeros", torch.bfloat16),
            ("mostly banned", torch.bfloat16),
            ("peaked", torch.float32),
            ("tied", torch.float16),
        )
    ],
)
def test_the_kernel_equals_its_plain_twin(
    kind: str, dtype: torch.dtype, device: torch.device, randn: Callable[..., torch.Tensor]
) -> None:
    vocab_size = 2 * BLOCK + 3
    logits = logits_of(kind, len(FILTERS), vocab_size + 5, dtype, randn)[:, :vocab_size]  # strided rows
    rows = rows_of(FILTERS, device)
    drawn = draw(logits, rows)
    assert drawn == filtered_sample_plain(logits, *rows).tolist()
    for row, one, token_id in zip(logits.float().cpu().numpy(), FILTERS, drawn, strict=True):
        assert token_id in reference_survivors(row, *one)[1]


@pytest.mark.parametrize("one", [(1.0, 2, 1.0, 0.0), (0.7, 6, 0.5, 0.2)], ids=str)
def test_what_is_drawn_is_what_survives(one: Filter, device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    """Of a row of nearly equal logits every survivor is drawn sooner or later, and nothing else ever."""
    draws = 12
    logits = (0.3 * randn(1, 2 * BLOCK, dtype=torch.float32)).bfloat16()
    logits[0, [3, 20, 30]] = 1.0  # a tie at the top
    certain, possible = reference_survivors(logits[0].float().cpu().numpy(), *one)
    drawn = set(draw(logits, rows_of([one] * draws, device, lines=[0] * draws)))
    assert drawn <= possible
    if len(certain) <= 2:
        assert drawn >= certain


def test_pitfall_9_top_k_of_1_takes_the_lowest_id_of_a_tie(device: torch.device) -> None:
    logits = torch.zeros(2, 3 * BLOCK, device=device, dtype=torch.bfloat16)
    logits[1, [BLOCK + 7, BLOCK + 3, 2 * BLOCK]] = 1.0
    ids = draw(logits, rows_of([(5.0, 1, 1.0, 0.0)] * 2, device))
    assert ids == [0, BLOCK + 3]


def test_an_unfiltered_row_draws_what_the_plain_kernel_draws(
    dtype: torch.dtype, device: torch.device, randn: Callable[..., torch.Tensor]
) -> None:
    logits = randn(4, 3 * BLOCK + 1, dtype=dtype)
    rows = rows_of([(0.0, 0, 1.0, 0.0), (0.7, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0), (3.0, 0, 1.0, 0.0)], device)
    expected = sample(logits, rows[3].temperatures, rows[3].seeds, rows[2])
    assert draw(logits, rows) == expected.tolist()


def test_lines_pick_rows_and_a_row_is_the_same_alone(device: torch.device, randn: Callable[..., torch.Tensor]) -> None:
    logits = randn(5, 2 * BLOCK, dtype=torch.bfloat16)
    rows = rows_of([(1.0, 20, 0.9, 0.0)] * 3, device, lines=[4, 0, 2])
    together = draw(logits, rows)
    for i in range(3):
        assert draw(logits, (*(column[i : i + 1] for column in rows[:3]), rows[3])) == together[i : i + 1]


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_row_without_any_finite_logit_gives_an_id_in_range(value: float, device: torch.device) -> None:
    logits = torch.full((2, BLOCK + 3), value, device=device)
    ids = draw(logits, rows_of([(1.0, 5, 0.9, 0.1), (0.0, 0, 1.0, 0.0)], device))
    assert ids == [0, 0]


def test_a_nan_never_wins(device: torch.device) -> None:
    logits = torch.arange(BLOCK * 2, dtype=torch.float32, device=device).unsqueeze(0)
    logits[0, 5:] = float("nan")
    ids = draw(logits, rows_of([(1e-3, 3, 0.9, 0.1)], device))
    assert ids == [4]


def test_the_scratch_row_may_be_full_to_the_last_place(device: torch.device) -> None:
    """As many candidates as the scratch row holds, one more, and one less."""
    filters: list[Filter] = [(1.0, 0, 0.97, 0.0), (1.0, BLOCK, 1.0, 0.0)]
    for num in (2 * BLOCK, 2 * BLOCK + 1):
        logits = torch.full((2, 3 * BLOCK), -100.0, device=device)
        logits[:, 7 : 7 + num] = torch.from_numpy(np.linspace(0, 0.5, num, dtype=np.float32))
        logits = logits.bfloat16()
        rows = rows_of(filters, device)
        assert draw(logits, rows) == filtered_sample_plain(logits, *rows).tolist()
