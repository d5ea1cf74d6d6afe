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

import torch

from nanovllm.engine.row_tables import RowTables, upload
from nanovllm.engine.scheduler import Batch, StepLogprobs
from nanovllm.engine.sequence import Logprobs, RowExtras, Sampling
from nanovllm.layers.filters import FilteredRows, filtered_sample, log_min_p
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
    def biases(self) -> dict[int, float]:
        """What is added to logits by token id; a banned token gets minus infinity."""
        bias, extras = self.extras.sampling.logit_bias, self.extras
        if self.position >= extras.banned_until or not extras.banned:
            return bias
        return bias | dict.fromkeys(extras.banned, float("-inf"))

    @property
    def is_edited(self) -> bool:
        return self.extras.sampling.has_penalties or bool(self.biases)

    @property
    def is_drawn_anew(self) -> bool:
        return self.is_edited or self.extras.sampling.has_filters


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
        self.rows: dict[int, RowExtras] = {}  # an entry stays until its row goes to somebody else
        # [rows, max_model_len] int32. A penalised row's tokens: the known ones come at admission, the sampled ones are
        # added as they are drawn, so that a step may be launched before the host has seen them.
        self.history: torch.Tensor | None = None
        if group.rank == 0:
            shape = (tables.pad_row + 1, max_model_len)
            self.history = torch.zeros(shape, dtype=torch.int32, device=self.device)

    def update(self, batch: Batch) -> None:
        """Enter the batch's new rows."""
        if self.rows:
            for row, *_ in batch.new_rows:
                self.rows.pop(row, None)
        for extras in batch.new_extras:
            self.rows[extras.row] = extras
            if self.history is not None and extras.history:
                self.history[extras.row, : len(extras.history)] = upload(extras.history, torch.int32, self.device)

    def apply(self, batch: Batch, ids: torch.Tensor, logits: torch.Tensor | None) -> list[PendingLogprobs]:
        """Draw again where a row asks for it: `ids` [S] and the last tokens in the tables are overwritten.

        `logits` [S or more, vocab] are the step's, on rank 0. Returns the log probabilities that were asked for.
        """
        lines = self._lines_of(batch) if self.rows else []
        return self.apply_to(lines, ids, logits) if lines else []

    def _lines_of(self, batch: Batch) -> list[Line]:
        lines, index = [], 0
        for line, row in enumerate(batch.rows):
            if batch.samples[line]:
                extras = self.rows.get(row)
                if extras is not None:
                    lines.append(Line(line, index, batch.starts[line] + batch.counts[line], extras))
                index += 1
        return lines

    def apply_to(self, lines: list[Line], ids: torch.Tensor, logits: torch.Tensor | None) -> list[PendingLogprobs]:
        """`apply` for given lines."""
        drawn = [line for line in lines if line.is_drawn_anew]
        if drawn:
            if logits is not None:
                self._draw(drawn, ids, logits)
            ids = self.group.broadcast(ids)
            indices, rows, positions = self._columns([(x.index, x.extras.row, x.position) for x in drawn])
            self.tables.last_tokens[rows] = ids[indices]
            if self.history is not None and any(line.extras.sampling.has_penalties for line in drawn):
                self.history[rows, positions] = ids[indices].int()
        wanted = [line for line in lines if line.extras.num_logprobs is not None]
        return self._logprobs(wanted, ids, logits) if logits is not None else []

    def warm_up(self, logits: torch.Tensor | None) -> None:
        """Do once the most that a step can ask for with so many rows of logits, in the padding row."""
        row, last = self.tables.pad_row, self.history.shape[1] - 1 if self.history is not None else 0
        filters = Sampling(1.0, 0, 20, 0.9, 0.1, 1.0, 0.0, 0.0, {})
        all_of_it = filters._replace(repetition_penalty=1.1, logit_bias={0: 1.0})
        num_lines = len(logits) if logits is not None else self.tables.pad_row
        ids = torch.zeros(num_lines, dtype=torch.int64, device=self.device)
        for sampling in (filters, all_of_it):
            extras = RowExtras(row, sampling, [0], 0, MAX_LOGPROBS, 1, [])
            self.apply_to([Line(i, i, last, extras) for i in range(num_lines)], ids, logits)

    # ------------------------------------------------------------------ drawing

    def _draw(self, lines: list[Line], ids: torch.Tensor, logits: torch.Tensor) -> None:
        as_they_are = [line for line in lines if not line.is_edited]
        if as_they_are:
            rows = self._filtered_rows(as_they_are, [line.index for line in as_they_are])
            ids[rows.lines] = filtered_sample(logits, rows)
        for some in chunks([line for line in lines if line.is_edited], self.rows_per_chunk):
            (indices,) = self._columns([(line.index,) for line in some])
            edited = self._edited(some, logits[indices].float())
            ids[indices] = filtered_sample(edited, self._filtered_rows(some, range(len(some))))

    def _filtered_rows(self, lines: list[Line], indices: Iterable[int]) -> FilteredRows:
        """The lines' parameters on the device; `indices` are their rows of the logits."""
        of = [line.extras.sampling for line in lines]
        ints = [
            (i, s.seed, x.position, s.top_k if s.top_k < self.vocab_size else 0)
            for i, x, s in zip(indices, lines, of, strict=False)
        ]
        floats = [(s.temperature, s.top_p, log_min_p(s.min_p)) for s in of]
        return FilteredRows(*self._columns(ints), *self._columns(floats, torch.float32))

    def _edited(self, lines: list[Line], logits: torch.Tensor) -> torch.Tensor:
        """`logits` [N, vocab] float32 of the lines, changed in place by biases, bans and penalties."""
        cells = [(i * self.vocab_size + t, bias) for i, x in enumerate(lines) for t, bias in x.biases.items()]
        if cells:
            places, biases = zip(*cells, strict=True)
            add_biases(logits, *(upload(places, torch.int64, self.device), upload(biases, torch.float32, self.device)))
        of = [line.extras.sampling for line in lines]
        if any(s.has_penalties for s in of):  # the others have penalties of no effect, whatever their history holds
            counts = [(x.extras.row, x.position, x.extras.num_prompt_tokens) for x in lines]
            rows, lengths, prompt_lengths = self._columns(counts)
            penalties = [(s.repetition_penalty, s.presence_penalty, s.frequency_penalty) for s in of]
            history = self.history[rows, : max(line.position for line in lines)]
            apply_penalties(logits, history, lengths, prompt_lengths, *self._columns(penalties, torch.float32))
        return logits

    def _columns(self, rows: list[tuple[float, ...]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Rows of numbers as columns on the device, in one copy: [len(rows[0]), len(rows)]."""
        return upload(list(zip(*rows, strict=True)), dtype, self.device)

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
