"""Sampling beyond temperature and seed: filters, penalties, biases, bans, log probabilities.

A step samples every row plainly first, inside its CUDA graph if it has one. If some of its rows ask for more, which the
host knows from plain Python data, `Extras` then reads the step's logits again, draws these rows' tokens anew and
overwrites the plain ones. All of it is queued on the device behind the step, and before the next one that reads the
tokens; nothing waits. So there is one ladder of graphs, and a batch without extras pays nothing.

Each rank follows the book-keeping, since all take part in the broadcast; only rank 0 has logits. The `ModelRunner` owns
the one instance of its rank.
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple, TypeVar

import numpy as np
import torch

from nanovllm.engine.row_tables import RowTables, upload
from nanovllm.engine.scheduler import Batch, StepLogprobs
from nanovllm.engine.sequence import Logprobs, RowExtras, Sampling
from nanovllm.layers.filters import FilterTables, filtered_sample, log_min_p
from nanovllm.layers.logits import RawLogprobs, add_biases, apply_penalties, raw_logprobs
from nanovllm.sampling_params import MAX_LOGPROBS
from nanovllm.utils.dist import Group

# Logits of float32 that exist at a time: 27 rows of 151,936.
CHUNK_ELEMENTS = 1 << 22

T = TypeVar("T")


class Line(NamedTuple):
    """One line of a batch whose row has extras."""

    line: int  # in the batch
    index: int  # in the step's logits and ids: lines that do not sample have none
    position: int  # of the token to be sampled
    extras: RowExtras

    @property
    def key(self) -> tuple[int, int, int]:
        return self.index, self.extras.row, self.position

    @property
    def biases(self) -> dict[int, float]:
        """What is added to logits by token id; a banned token gets minus infinity."""
        bias, extras = self.extras.sampling.logit_bias, self.extras
        if self.position >= extras.banned_until:
            return bias
        return bias | dict.fromkeys(extras.banned, float("-inf"))


class PendingLogprobs(NamedTuple):
    """Log probabilities of N tokens, on their way to the host."""

    of_prompt: bool
    lines: list[int]  # [N], to which line of the batch each token belongs
    num_tops: list[int]  # [N], how many alternatives are wanted
    raw: RawLogprobs

    def entries(self) -> Iterator[tuple[int, Logprobs]]:
        """(line, what the sequence keeps of the token) for each token, once the tensors are on the host."""
        tokens = zip(*(column.tolist() for column in self.raw), strict=True)
        for line, num_top, (token_id, logprob, rank, top_ids, top_logprobs) in zip(
            self.lines, self.num_tops, tokens, strict=True
        ):
            top = [(i, p, r) for r, (i, p) in enumerate(zip(top_ids, top_logprobs, strict=True), 1) if i != token_id]
            yield line, [(token_id, logprob, rank), *(entry for entry in top if entry[2] <= num_top)]


def collect(pending: Iterable[PendingLogprobs]) -> StepLogprobs | None:
    """All of a step's log probabilities as plain data, None if there are none."""
    logprobs = None
    for some in pending:
        logprobs = logprobs or StepLogprobs()
        for line, entry in some.entries():
            if some.of_prompt:
                logprobs.prompt.setdefault(line, []).append(entry)
            else:
                logprobs.sampled[line] = entry
    return logprobs


class Extras:
    """The extras of all rows, and the histories that penalties count."""

    def __init__(self, tables: RowTables, vocab_size: int, max_model_len: int, group: Group) -> None:
        self.tables = tables
        self.group = group
        self.device = tables.device
        self.vocab_size = vocab_size
        self.rows_per_chunk = max(CHUNK_ELEMENTS // vocab_size, 1)
        # Entries stay until their rows go to somebody else. Rows of `edited` have penalties or biases; rows of
        # `filtered` have filters and nothing else, so that a step need not look at their entries.
        self.rows: dict[int, RowExtras] = {}
        self.edited: set[int] = set()
        self.filtered: set[int] = set()
        num_rows = tables.pad_row + 1
        self.filters = FilterTables(
            tables.seeds,
            tables.temperatures,
            top_ks=torch.zeros(num_rows, dtype=torch.int32, device=self.device),
            top_ps=torch.ones(num_rows, dtype=torch.float32, device=self.device),
            log_min_ps=torch.full((num_rows,), log_min_p(0), dtype=torch.float32, device=self.device),
        )
        # [rows, max_model_len] int32. A penalised row's tokens: the known ones come at admission, the sampled ones are
        # added as they are drawn, so that a step may be launched before the host has seen them.
        self.history: torch.Tensor | None = None
        if group.rank == 0:
            self.history = torch.zeros((num_rows, max_model_len), dtype=torch.int32, device=self.device)

    def update(self, batch: Batch) -> None:
        """Enter the batch's new rows."""
        if self.rows:
            for row, *_ in batch.new_rows:
                self.rows.pop(row, None)
                self.edited.discard(row)
                self.filtered.discard(row)
        if batch.new_extras:
            self._enter(batch.new_extras)

    def _enter(self, new: list[RowExtras]) -> None:
        for extras in new:
            self.rows[extras.row] = extras
            if extras.sampling.has_penalties or extras.sampling.logit_bias:
                self.edited.add(extras.row)
            elif not extras.banned and extras.num_logprobs is None:
                self.filtered.add(extras.row)
            if self.history is not None and extras.history:
                self.history[extras.row, : len(extras.history)] = upload(extras.history, torch.int32, self.device)
        rows = upload([extras.row for extras in new], torch.int64, self.device)
        of = [extras.sampling for extras in new]
        top_ks = [s.top_k if s.top_k < self.vocab_size else 0 for s in of]
        self.filters.top_ks[rows] = upload(top_ks, torch.int32, self.device)
        self.filters.top_ps[rows] = upload([s.top_p for s in of], torch.float32, self.device)
        self.filters.log_min_ps[rows] = upload([log_min_p(s.min_p) for s in of], torch.float32, self.device)

    def apply(self, batch: Batch, ids: torch.Tensor, logits: torch.Tensor | None) -> list[PendingLogprobs]:
        """Draw again where a row asks for it: `ids` [S] and the last tokens in the tables are overwritten.

        `logits` [S or more, vocab] are the step's, on rank 0. Returns the log probabilities that were asked for.
        """
        if not self.rows:
            return []
        filtered: list[tuple[int, int, int]] = []
        lines: list[Line] = []
        index = 0
        for line, (row, start, count, samples) in enumerate(
            zip(batch.rows, batch.starts, batch.counts, batch.samples, strict=True)
        ):
            if samples:
                if row in self.filtered:
                    filtered.append((index, row, start + count))
                elif row in self.rows:
                    lines.append(Line(line, index, start + count, self.rows[row]))
                index += 1
        return self.apply_to(filtered, lines, ids, logits) if filtered or lines else []

    def apply_to(
        self, filtered: list[tuple[int, int, int]], lines: list[Line], ids: torch.Tensor, logits: torch.Tensor | None
    ) -> list[PendingLogprobs]:
        """`apply` to rows that are filtered, as (index, row, position), and to lines that may ask for anything."""
        edited: list[Line] = []
        for line in lines:
            if line.extras.row in self.edited or line.position < line.extras.banned_until:
                edited.append(line)
            elif line.extras.has_filters:
                filtered.append(line.key)
        if filtered or edited:
            indices, rows, positions = self._columns(filtered + [line.key for line in edited])
            if logits is not None:
                n = len(filtered)
                if filtered:
                    at = indices[:n], rows[:n], positions[:n]
                    ids[at[0]] = filtered_sample(logits, *at, self.filters)
                for some in chunks(edited, self.rows_per_chunk):
                    at = slice(n, n + len(some))
                    changed = self._edited(some, rows[at], positions[at], logits[indices[at]].float())
                    each = torch.arange(len(some), device=self.device)
                    ids[indices[at]] = filtered_sample(changed, each, rows[at], positions[at], self.filters)
                    n += len(some)
            ids = self.group.broadcast(ids)
            tokens = ids[indices]
            self.tables.last_tokens[rows] = tokens
            if self.history is not None and edited:
                self.history[rows, positions] = tokens.int()
        wanted = [line for line in lines if line.extras.num_logprobs is not None]
        return self._logprobs(wanted, ids, logits) if logits is not None else []

    def warm_up(self, logits: torch.Tensor | None) -> None:
        """Do once the most that a step can ask for with so many rows of logits, in the padding row."""
        row = self.tables.pad_row
        last = self.history.shape[1] - 1 if self.history is not None else 0
        filters = Sampling(1.0, 0, 20, 0.9, 0.1, 1.0, 0.0, 0.0, {})
        all_of_it = filters._replace(repetition_penalty=1.1, logit_bias={0: 1.0})
        num_lines = len(logits) if logits is not None else row
        ids = torch.zeros(num_lines, dtype=torch.int64, device=self.device)
        self.tables.temperatures[row] = 1.0
        for sampling in (filters, all_of_it):
            extras = RowExtras(row, sampling, True, [], 0, MAX_LOGPROBS, 1, [])
            self._enter([extras])
            self.apply_to([], [Line(i, i, last, extras) for i in range(num_lines)], ids, logits)
        self.tables.temperatures[row] = 0.0
        for rows in (self.rows, self.edited, self.filtered):
            rows.clear()

    # ------------------------------------------------------------------ drawing

    def _edited(
        self, lines: list[Line], rows: torch.Tensor, positions: torch.Tensor, logits: torch.Tensor
    ) -> torch.Tensor:
        """`logits` [N, vocab] float32 of the lines, changed in place by biases, bans and penalties."""
        cells = [(i * self.vocab_size + t, bias) for i, x in enumerate(lines) for t, bias in x.biases.items()]
        if cells:
            places, biases = zip(*cells, strict=True)
            add_biases(logits, *(upload(places, torch.int64, self.device), upload(biases, torch.float32, self.device)))
        of = [line.extras.sampling for line in lines]
        if any(s.has_penalties for s in of):  # the others have penalties of no effect, whatever their history holds
            prompt_lengths = upload([line.extras.num_prompt_tokens for line in lines], torch.int64, self.device)
            penalties = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in of]
            history = self.history[rows, : max(line.position for line in lines)]
            apply_penalties(logits, history, positions, prompt_lengths, *self._columns(penalties, torch.float32))
        return logits

    def _columns(self, rows: list[tuple[float, ...]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Rows of numbers as columns on the device, in one copy: [len(rows[0]), len(rows)]."""
        return upload(np.ascontiguousarray(np.array(rows).T), dtype, self.device)

    # ------------------------------------------------------------------ log probabilities

    def _logprobs(self, lines: list[Line], ids: torch.Tensor, logits: torch.Tensor) -> list[PendingLogprobs]:
        pending = []
        for some in chunks(lines, self.rows_per_chunk):
            (indices,) = self._columns([(line.index,) for line in some])
            num_tops = [line.extras.num_logprobs for line in some]
            raw = raw_logprobs(logits[indices].float(), ids[indices], max(num_tops))
            pending.append(PendingLogprobs(False, [line.line for line in some], num_tops, raw))
        return pending


def chunks(items: list[T], size: int) -> Iterator[list[T]]:
    """Consecutive parts of at most `size` items."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
