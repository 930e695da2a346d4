"""What decoding keeps of the sequences so far: a constant state per KDA layer, a paged latent cache per MLA layer.

`SequenceStates` holds rows that come and go independently of each other (continuous batching); a row can be forked, and
forks share the full pages of their common prefix. A forward pass continues some of the rows: `SequenceStates.extend`
says by how many tokens each and gives the `StateView` that the model reads and updates.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from k3train.model.transformer_config import K3TransformerConfig

PAGE_SIZE = 64  # tokens
# From `conv`, `memory`, the numbers of some tokens and their `cu_seqlens` to the states after them.
StatesAfter = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class PagePool:
    """Numbers of the pages in use, with how many rows refer to each; the pages' contents lie with the layers."""

    def __init__(self) -> None:
        self.references: list[int] = []
        self._free: list[int] = []

    @property
    def in_use(self) -> int:
        """Pages that at least one row refers to."""
        return len(self.references) - len(self._free)

    def take(self) -> int:
        """A page for one row."""
        if self._free:
            page = heapq.heappop(self._free)
            self.references[page] = 1
            return page
        self.references.append(1)
        return len(self.references) - 1

    def share(self, page: int) -> int:
        """The same page for one more row."""
        self.references[page] += 1
        return page

    def release(self, page: int) -> None:
        """One row less; a page without rows is free."""
        self.references[page] -= 1
        if not self.references[page]:
            heapq.heappush(self._free, page)


@dataclass
class KDABuffers:
    """Of one KDA layer: the last inputs of the q, k and v convolutions, and the recurrent state in fp32.

    `conv` [slots, 3 * channels / TP, taps - 1], `memory` [slots, heads / TP, head_dim, head_dim].
    """

    conv: torch.Tensor
    memory: torch.Tensor


@dataclass
class MLACache:
    """Of one MLA layer: the normalised latent and the shared key part of every token.

    `pages` [pages, page size, kv_lora_rank + qk_rope_head_dim].
    """

    pages: torch.Tensor


class SequenceStates:
    """Decoding states of any number of sequences, for the layers of one model on this rank.

    Rows are numbered by their slot; a removed row's slot is used again. Buffers double when they are full, so a token
    costs no copy of what is there. All pages of a row are full but its last one, and only a row's own last page is
    ever written, so forks share full pages and copy at most one.
    """

    def __init__(
        self,
        config: K3TransformerConfig,
        layers: Iterable[int],
        device: torch.device | str = "cpu",
        page_size: int = PAGE_SIZE,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.page_size = page_size
        self.dtype = dtype or config.params_dtype
        self.device = torch.device(device)
        self.pool = PagePool()
        self.tokens: dict[int, int] = {}  # of every row, how many it holds
        self._pages: dict[int, list[int]] = {}
        self._free_slots: list[int] = []
        self._table = torch.zeros(0, 1, dtype=torch.long, device=self.device)
        with torch.inference_mode(False):  # so that they can be written inside and outside of it
            self.layers = {index: self._empty(config, index) for index in layers}

    @staticmethod
    def of(model: torch.nn.Module | Sequence[torch.nn.Module], page_size: int = PAGE_SIZE) -> SequenceStates:
        """States for a whole `K3Model`, or for the chunks of it that a pipeline rank holds."""
        chunks = [model] if isinstance(model, torch.nn.Module) else model
        weight = next(chunks[0].parameters())
        layers = [index for chunk in chunks for index in map(int, chunk.decoder.layers.keys())]
        return SequenceStates(chunks[0].config, layers, weight.device, page_size, weight.dtype)

    def _empty(self, config: K3TransformerConfig, index: int) -> KDABuffers | MLACache:
        dtype, ranks, mla, kda = self.dtype, config.tensor_model_parallel_size, config.k3.mla, config.k3.kda
        ahead = index == config.num_layers  # multi-token prediction's
        if config.k3.mtp.mixer == "mla" if ahead else config.k3.is_full_attention(index):
            width = mla.kv_lora_rank + mla.qk_rope_head_dim
            return MLACache(torch.zeros(0, self.page_size, width, dtype=dtype, device=self.device))
        heads = kda.num_heads // ranks
        conv = torch.zeros(0, 3 * heads * kda.head_dim, kda.conv_size - 1, dtype=dtype, device=self.device)
        wide = torch.promote_types(dtype, torch.float32)
        memory = torch.zeros(0, heads, kda.head_dim, kda.head_dim, dtype=wide, device=self.device)
        return KDABuffers(conv, memory)

    def add(self, count: int = 1) -> list[int]:
        """`count` empty rows."""
        rows = [self._new_row() for _ in range(count)]
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        for buffers in self._of_kind(KDABuffers):
            buffers.conv[index] = 0
            buffers.memory[index] = 0
        return rows

    def fork(self, row: int, count: int = 1) -> list[int]:
        """`count` more rows that hold what `row` holds and go on independently of it."""
        if not count:
            return []
        rows = [self._new_row() for _ in range(count)]
        full, rest = divmod(self.tokens[row], self.page_size)
        for new in rows:
            self.tokens[new] = self.tokens[row]
            self._pages[new] = [self.pool.share(page) for page in self._pages[row][:full]]
            self._table[new, :full] = self._table[row, :full]
            if rest:
                self._append_page(new)
        self._fit_pages()
        index = torch.tensor(rows, device=self.device)
        for buffers in self._of_kind(KDABuffers):
            buffers.conv[index] = buffers.conv[row].clone()
            buffers.memory[index] = buffers.memory[row].clone()
        if rest:
            last = torch.tensor([self._pages[new][-1] for new in rows], device=self.device)
            for cache in self._of_kind(MLACache):
                cache.pages[last] = cache.pages[self._pages[row][full]].clone()
        return rows

    def remove(self, rows: Iterable[int]) -> None:
        """Forget these rows; their slots and the pages that only they refer to are free again."""
        for row in rows:
            del self.tokens[row]
            for page in self._pages.pop(row):
                self.pool.release(page)
            heapq.heappush(self._free_slots, row)

    def extend(
        self, rows: Sequence[int], counts: Sequence[int], trial: bool = False, drafted: bool = False
    ) -> StateView:
        """Room for `counts[i]` more tokens of `rows[i]`, for one forward pass that computes them.

        After a `trial`, which may turn out to be about the wrong tokens, `settle` has to say how many of them stay.
        `drafted` is a draft's own pass, which is about a few tokens of many rows as well.

        Raises:
            ValueError: an unknown row, a row twice, or a count below 1.
        """
        if len(set(rows)) != len(rows) or len(rows) != len(counts) or min(counts, default=0) < 1:
            raise ValueError(f"rows {list(rows)} and counts {list(counts)} must be distinct rows and positive counts.")
        past = [self.tokens[row] for row in rows]
        for row, count in zip(rows, counts):
            self.tokens[row] += count
            while len(self._pages[row]) * self.page_size < self.tokens[row]:
                self._append_page(row)
        self._fit_pages()
        return StateView(self, list(rows), past, list(counts), trial, trial or drafted)

    def settle(self, view: StateView, counts: Sequence[int]) -> None:
        """Keep the first `counts[i]` tokens of each row of a trial whose forward pass has run; the rest never were.

        Raises:
            ValueError: the view is no trial or is settled, or a count is not between 1 and the trial's.
        """
        if not view.trial or len(counts) != len(view.rows) or not all(1 <= c <= t for c, t in zip(counts, view.counts)):
            raise ValueError(f"a trial of {view.counts} tokens cannot be settled at {list(counts)}.")
        view.trial = False
        if list(counts) == view.counts:
            for state, _, conv, memory in view.postponed:
                state.store(conv, memory)
        elif view.postponed:
            kept = torch.tensor(list(counts), device=self.device)
            ends = kept.cumsum(0)
            row_of = torch.repeat_interleave(torch.arange(len(counts), device=self.device), kept)
            starts = view.cu_seqlens[:-1] - (ends - kept)
            chosen = torch.arange(len(row_of), device=self.device) + starts[row_of]
            cu_seqlens = torch.cat([ends.new_zeros(1), ends])
            for state, after, _, _ in view.postponed:
                state.store(*after(*state.load(), chosen, cu_seqlens))
        view.postponed.clear()
        for row, past, count in zip(view.rows, view.past, counts):
            self._cut(row, past + count)

    def shorten(self, row: int, tokens: int) -> None:
        """Forget all of a row but its first `tokens`.

        Raises:
            ValueError: a KDA layer, which cannot go back, or more tokens than there are.
        """
        if self._of_kind(KDABuffers) or not 0 <= tokens <= self.tokens[row]:
            raise ValueError(f"row {row} of {self.tokens[row]} tokens cannot be shortened to {tokens}.")
        self._cut(row, tokens)

    def _cut(self, row: int, tokens: int) -> None:
        """Only pages that the row alone refers to may be cut into: the next token is written behind the cut."""
        self.tokens[row] = tokens
        pages = self._pages[row]
        while len(pages) * self.page_size >= tokens + self.page_size:
            self.pool.release(pages.pop())
        if tokens % self.page_size and self.pool.references[pages[-1]] > 1:
            raise ValueError(f"row {row} cannot be cut at {tokens}: other rows hold that page too.")

    def page_numbers(self, rows: torch.Tensor, pages: int) -> torch.Tensor:
        """[n, pages]: the first pages of each row; arbitrary ones behind its last."""
        return self._table[rows, :pages]

    def bytes_per_row(self) -> int:
        """What a row costs in all KDA layers, however long it is."""
        kda = self._of_kind(KDABuffers)
        return sum(t[0:1].element_size() * t[0].numel() for b in kda for t in (b.conv, b.memory)) if self.tokens else 0

    def bytes_per_token(self) -> int:
        """What a token costs in all MLA layers."""
        return sum(c.pages.element_size() * c.pages.shape[-1] for c in self._of_kind(MLACache))

    def bytes_in_use(self) -> int:
        """What the present rows cost, shared pages once."""
        pages = self.pool.in_use * self.page_size * self.bytes_per_token()
        return pages + len(self.tokens) * self.bytes_per_row()

    def bytes_allocated(self) -> int:
        """What the buffers take."""
        tensors = [t for b in self.layers.values() for t in vars(b).values()]
        return sum(t.numel() * t.element_size() for t in tensors)

    def _of_kind(self, kind: type) -> list:
        return [buffers for buffers in self.layers.values() if isinstance(buffers, kind)]

    def _new_row(self) -> int:
        row = heapq.heappop(self._free_slots) if self._free_slots else len(self.tokens)
        self.tokens[row], self._pages[row] = 0, []
        if row >= len(self._table):
            self._table = _grown(self._table, row + 1)
            for buffers in self._of_kind(KDABuffers):
                buffers.conv = _grown(buffers.conv, row + 1)
                buffers.memory = _grown(buffers.memory, row + 1)
        return row

    def _append_page(self, row: int) -> None:
        pages = self._pages[row]
        pages.append(self.pool.take())
        if len(pages) > self._table.shape[1]:
            self._table = _grown(self._table.t(), len(pages)).t().contiguous()
        self._table[row, len(pages) - 1] = pages[-1]

    def _fit_pages(self) -> None:
        for cache in self._of_kind(MLACache):
            if len(cache.pages) < len(self.pool.references):
                cache.pages = _grown(cache.pages, len(self.pool.references))


@torch.inference_mode(False)
@torch.no_grad()
def _grown(buffer: torch.Tensor, least: int) -> torch.Tensor:
    """`buffer` with its first dimension doubled until it is at least `least`."""
    size = max(least, 2 * len(buffer))
    grown = buffer.new_zeros(size, *buffer.shape[1:])
    grown[: len(buffer)] = buffer
    return grown


class StateView:
    """The rows that one forward pass continues. Its tokens are those of the rows, one row after the other.

    Tokens behind them (filler that makes the length divisible) belong to no row and leave no trace.

    Attributes:
        past, counts: of each row, the tokens that it held and those that come now.
        num_tokens: the sum of `counts`.
        cu_seqlens: [rows + 1], where each row's tokens start, and `num_tokens`.
        lengths: [rows], `past + counts`.
        one_each: whether every row gets a single token.
        trial: whether `SequenceStates.settle` is still to say which tokens stay.
        few: whether rows of a few tokens may attend together. Plain decoding never asks for it: its bits are its own.
    """

    def __init__(
        self,
        states: SequenceStates,
        rows: list[int],
        past: list[int],
        counts: list[int],
        trial: bool = False,
        few: bool = False,
    ) -> None:
        self.states, self.rows, self.past, self.counts = states, rows, past, counts
        self.trial, self.few = trial, few
        # Of each KDA layer: its states, what makes those after a part of the tokens, and those after all.
        self.postponed: list[tuple[KDAView, StatesAfter, torch.Tensor, torch.Tensor]] = []
        self.num_tokens = sum(counts)
        self.one_each = self.num_tokens == len(rows)
        self.longest = max(p + c for p, c in zip(past, counts))
        device = states.device
        self.index = torch.tensor(rows, device=device)
        number = torch.tensor(counts, device=device)
        self.lengths = torch.tensor(past, device=device) + number
        ends = number.cumsum(0)
        self.cu_seqlens = torch.cat([ends.new_zeros(1), ends])
        # The KDA buffers need no gathering where the rows are the first slots in order.
        self.leading = len(rows) if rows == list(range(len(rows))) else None
        size = states.page_size
        self.table = states.page_numbers(self.index, -(-self.longest // size))
        if self.one_each:
            row_of, position = torch.arange(len(rows), device=device), self.lengths - 1
        else:
            row_of = torch.repeat_interleave(torch.arange(len(rows), device=device), number)
            position = torch.arange(self.num_tokens, device=device) + (self.lengths - ends)[row_of]
        self.places = self.table[row_of, position // size] * size + position % size

    def layer(self, index: int) -> KDAView | MLAView:
        """What decoder layer `index` (0-indexed) holds of these rows."""
        buffers = self.states.layers[index]
        return KDAView(self, buffers) if isinstance(buffers, KDABuffers) else MLAView(self, buffers)


@dataclass
class KDAView:
    """One KDA layer's states of the rows of `view`."""

    view: StateView
    buffers: KDABuffers

    def load(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`conv` [rows, channels, taps - 1] and `memory` [rows, heads, head_dim, head_dim]."""
        if self.view.leading is not None:
            return self.buffers.conv[: self.view.leading], self.buffers.memory[: self.view.leading]
        return self.buffers.conv[self.view.index], self.buffers.memory[self.view.index]

    def postpone(self, after: StatesAfter, conv: torch.Tensor, memory: torch.Tensor) -> None:
        """Leave the states as they are until it is known how many of the tokens stay."""
        self.view.postponed.append((self, after, conv, memory))

    @torch.no_grad()
    def store(self, conv: torch.Tensor, memory: torch.Tensor) -> None:
        """Keep the states after the new tokens."""
        if self.view.leading is not None:
            self.buffers.conv[: self.view.leading] = conv
            self.buffers.memory[: self.view.leading] = memory
        else:
            self.buffers.conv[self.view.index] = conv.to(self.buffers.conv.dtype)
            self.buffers.memory[self.view.index] = memory.to(self.buffers.memory.dtype)


@dataclass
class MLAView:
    """One MLA layer's cache of the rows of `view`."""

    view: StateView
    cache: MLACache

    @torch.no_grad()
    def append(self, latent: torch.Tensor) -> None:
        """Keep the latents and shared keys [num_tokens, kv_lora_rank + qk_rope_head_dim] of the new tokens."""
        self.cache.pages.flatten(0, 1).index_copy_(0, self.view.places, latent.to(self.cache.pages.dtype))

    def read(self, rows: torch.Tensor | slice, longest: int) -> torch.Tensor:
        """[rows, longest, kv_lora_rank + qk_rope_head_dim] of some rows; arbitrary behind a row's length."""
        table = self.view.table[rows, : -(-longest // self.view.states.page_size)]
        gathered = self.cache.pages.index_select(0, table.flatten())
        return gathered.view(table.shape[0], -1, gathered.shape[-1])[:, :longest]


LayerState = KDAView | MLAView
