"""MTP and other heads (draft-mtp, draft-eagle3, draft-dflash) draft for a batch of sequences.

Each draft token is predicted from the head's hidden state of the one before
(models/architectures/mtp.py, models/drafters/). The head's keys and values lie in the model's KV
blocks. The model's own steps keep them up to date and overwrite those of draft tokens."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Ordered

from logitless.engine.batch import DeviceFailed, StepResult, UBatch, token_slots
from logitless.engine.runner.hidden_rows import NOTHING, HiddenRows
from logitless.engine.sequence import Sequence
from logitless.engine.speculation.draft_builder import AllocateSlots, DraftBuilder, StepRunner
from logitless.engine.speculation.draft_learner import DraftLearner
from logitless.models.drafters.drafter_file import DrafterFile

log = logging.getLogger("logitless.speculation")
REST = 12  # steps without drafts after a failed draft step


class _HeadDrafter:
    """Drafts for a batch of sequences by one of the engine's draft steps."""

    def __init__(self, engine: StepRunner, ids: Ordered[int], eog_ids: Iterable[int]) -> None:
        """`ids`: token ids of the columns of the draft step's logits."""
        self._engine = engine
        self._ids = ids
        self._eog_ids = frozenset(eog_ids)
        self._rest = 0  # remaining steps without drafts

    def propose(self, requests: list[tuple[Sequence, int]], allocate: AllocateSlots) -> dict[Sequence, list[int]]:
        """Draft for each (sequence, most tokens) that can begin a draft. Errors: as of `_run`."""
        if self._rest:
            self._rest -= 1
            return {}
        lengths = [(seq, self._length(seq, n_most, allocate)) for seq, n_most in requests]
        builders = [DraftBuilder(seq, n) for seq, n in lengths if n > 0]
        for weights in {builder.seq.choice.weights for builder in builders}:
            self._draft([builder for builder in builders if builder.seq.choice.weights == weights], weights)
        return {builder.seq: builder.draft for builder in builders if builder.draft}

    @abstractmethod
    def _length(self, seq: Sequence, n_most: int, allocate: AllocateSlots) -> int:
        """Draft tokens of a sequence, `n_most` at most, that have token slots; at most 0: it drafts none."""

    @abstractmethod
    def _draft(self, builders: list[DraftBuilder], weights: int) -> None:
        """Draft for sequences with the same weights."""

    def _run(self, batch: UBatch) -> StepResult | None:
        """Result of a draft step; None: it failed, and the next steps of the model have no drafts.

        Raises DeviceFailed if a device was lost: the target model has lost its memory, too."""
        try:
            return self._engine.step(batch)
        except DeviceFailed:
            raise
        except Exception as error:  # the target continues without these drafts
            log.warning("drafting failed: %s", " ".join(str(error).split()))
            self._rest = REST
            return None

    def sleep(self) -> None:
        """Do nothing: its memory is the target model's."""

    def wake(self) -> None:
        """Do nothing: its memory is the target model's."""


class MTPDrafter(_HeadDrafter):
    """Drafts by the model's MTP head, an EAGLE-3 drafter, Gemma 4's assistant or a draft head: a token a step."""

    def __init__(self, engine: StepRunner, hidden: HiddenRows, ids: Ordered[int], eog_ids: Iterable[int] = ()) -> None:
        super().__init__(engine, ids, eog_ids)
        self._hidden = hidden

    def _length(self, seq: Sequence, n_most: int, allocate: AllocateSlots) -> int:
        """As declared; the sequence's last step has left a hidden state."""
        pending = seq.kv.copy is not None or seq.kv.window_copy is not None  # a copy that the next step does
        begins = seq.n_uncomputed == 1 and self._hidden.of(seq, seq.n_computed - 1) != NOTHING
        # token slots for the uncomputed token and for all draft tokens but the last
        return 0 if n_most <= 0 or pending or not begins else allocate(seq, n_most)

    def _draft(self, builders: list[DraftBuilder], weights: int) -> None:
        """As declared, one token of each at a time."""
        while builders and (result := self._run(self._batch(builders, weights))) is not None:
            builders = [b for i, b in enumerate(builders) if b.take(result, i, self._ids, self._eog_ids)]

    def _batch(self, builders: list[DraftBuilder], weights: int) -> UBatch:
        """Batch of the last token of each draft."""
        batch = UBatch(weights=weights, mtp=True)
        for i, builder in enumerate(builders):
            seq = builder.seq
            assert seq.slot is not None
            id, pos = seq.slot.id, len(seq.tokens) - 1 + (0 if self._hidden.fixed else len(builder.draft))
            batch.tokens.append(builder.draft[-1] if builder.draft else seq.tokens[-1])
            cell = pos - self._hidden.behind
            batch.pos.append(pos)
            batch.seen.append(cell - self._hidden.fixed)
            batch.slot.append(id)
            batch.slot_mapping += token_slots(seq.kv.blocks, (cell,))
            if seq.kv.window_blocks:
                batch.window_slot_mapping += token_slots(seq.kv.window_blocks, (cell,))
            begin, end = self._hidden.states(seq, len(builder.draft))
            batch.begin += begin
            batch.end += end
            row = self._hidden.draft_row(id)
            batch.hidden_before.append(row if builder.draft else self._hidden.of(seq, pos - 1))
            batch.hidden_to.append(row)
            if not seq.kv.uploaded and not builder.draft:
                batch.tables[id] = seq.kv.blocks
                if seq.kv.window_blocks:
                    batch.window_tables[id] = seq.kv.window_blocks
            builder.ask(batch, i, self._ids)
        return batch


class LearningDrafter(MTPDrafter):
    """Drafts by a draft head, and gives its learner the tokens of all sequences."""

    def __init__(
        self, engine: StepRunner, hidden: HiddenRows, learner: DraftLearner, eog_ids: Iterable[int] = ()
    ) -> None:
        super().__init__(engine, hidden, learner.vocabulary, eog_ids)
        self.learner = learner

    def propose(self, requests: list[tuple[Sequence, int]], allocate: AllocateSlots) -> dict[Sequence, list[int]]:
        for seq, _ in requests:
            self.learner.collect(seq)
        return super().propose(requests, allocate)

    def sleep(self) -> None:
        """Save the head; its examples go with the device's memory."""
        self.learner.forget()
        self.learner.save()


class DFlashDrafter(_HeadDrafter):
    """Drafts by a DFlash drafter: a block of tokens of each sequence in one step.

    The block (models/drafters/dflash.py) lies behind the sequence's tokens in its KV blocks, where the
    model's next step overwrites it."""

    def __init__(self, engine: StepRunner, file: DrafterFile, ids: Ordered[int], eog_ids: Iterable[int] = ()) -> None:
        super().__init__(engine, ids, eog_ids)
        self._file = file

    def _length(self, seq: Sequence, n_most: int, allocate: AllocateSlots) -> int:
        n = min(n_most, self._file.block_size - 1)
        return 0 if n <= 0 or seq.n_uncomputed != 1 or seq.kv.copy is not None else allocate(seq, 1 + n) - 1

    def _draft(self, builders: list[DraftBuilder], weights: int) -> None:
        if (result := self._run(self._batch(builders, weights))) is None:
            return
        row = 0
        for builder in builders:
            rows = range(row, row + builder.n_most)
            row += builder.n_most
            for i in rows:
                if not builder.take(result, i, self._ids, self._eog_ids):
                    break

    def _batch(self, builders: list[DraftBuilder], weights: int) -> UBatch:
        """Batch of the blocks: each sequence's last token, and masks."""
        batch = UBatch(weights=weights, mtp=True)
        for builder in builders:
            seq = builder.seq
            assert seq.slot is not None
            first, table = len(seq.tokens) - 1, seq.kv.blocks
            places = range(first, first + 1 + builder.n_most)
            batch.tokens += [seq.tokens[-1], *[self._file.mask_token] * builder.n_most]
            batch.pos += places
            batch.seen += places if self._file.causal else [places[-1]] * len(places)
            batch.slot += [seq.slot.id] * len(places)
            batch.slot_mapping += token_slots(table, places)
            if not seq.kv.uploaded:
                batch.tables[seq.slot.id] = table
            for i in range(builder.n_most):
                # the tokens between are not known: each is taken to use one random draw
                builder.n_dist = builder.n_xtc = i
                builder.ask(batch, len(batch.tokens) - builder.n_most + i, self._ids)
            builder.n_dist = builder.n_xtc = 0
        return batch
