"""Warns, of each thing once, where a training loop is most likely not what its author meant; training goes on."""

from __future__ import annotations

import warnings

from cannikin.runtime.entry import BatchEntry, begins_alike

_UNPLANNED = 30  # batches of the script's own after which somebody should hear that nothing adapts
_UNUSED = 30  # warn after this many gradients that no step of our optimizer has used, where some were thrown away
_PILED = 300  # and else: so many batches may be meant to pile up for one step


class Mistakes:
    """What one model's loop has been warned of, and what tells that it should be.

    Attributes:
        seeks_unplanned: whether a script that nobody tells what to draw is warned of.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.seeks_unplanned = world_size > 1
        self._rank = rank
        self._seeks_other_lists = rank == 0  # in the dataset
        self._has_padded = False
        self._has_skipped = False
        self._seeks_alike = rank == 0  # streams of ranks' own that begin alike
        self._has_forgone = False  # gradients have gone before a step of ours has used them
        self._num_unused: int | None = 0  # gradients that no optimizer step of ours has used; None after the first one

    def note_skipped(self, num_skipped: int) -> None:
        """Take note of batches that the loop has passed over."""
        if num_skipped and not self._has_skipped:
            self._has_skipped = True
            warnings.warn(
                f"{num_skipped} batches were taken and never trained on: that is fine where every rank left them out; "
                "to resume a run, loader.load_state_dict(saved) begins at the next sample and reads none twice",
                RuntimeWarning,
                stacklevel=3,
            )

    def note_gradient(self) -> None:
        """Take note of a gradient that was reduced; perhaps another optimizer steps the parameters, or none."""
        if self._num_unused is None:
            return
        self._num_unused += 1
        if self._num_unused >= (_UNUSED if self._has_forgone else _PILED):
            num_unused, self._num_unused = self._num_unused, None
            warnings.warn(
                f"{num_unused} gradients, and step() of the optimizer that HeteroDataParallel was given has not been "
                "called: nothing is measured and no learning rate is scaled; give it the optimizer that the loop steps",
                RuntimeWarning,
                stacklevel=2,
            )

    def note_forgone(self) -> None:
        """Take note that gradients were thrown away which our optimizer has not used: perhaps another one has."""
        self._has_forgone = True

    def note_update(self) -> None:
        """Take note that our optimizer has stepped, or that its steps are seen elsewhere."""
        self._num_unused = None

    def note_batch(self, entry: BatchEntry) -> None:
        """Take note of a batch's samples; every rank may draw the same from what should be a stream of its own."""
        if self._seeks_alike and begins_alike(entry):
            self._seeks_alike = False
            warnings.warn(
                "the streams that ranks have of their own (sharded=True, a split by rank, or like() of an iterator) "
                "begin with the same samples on all of them, so that every sample is trained on once per rank: give "
                "each rank a part, such as files[rank::world_size] or a shuffle by a seed of its own; or, where all "
                "read the same stream, leave sharded=True out, and each is given its slice",
                RuntimeWarning,
                stacklevel=2,
            )

    def note_lists(self, epoch: int) -> None:
        """Take note that the dataset's lists are not the same on all ranks in this epoch."""
        if self._seeks_other_lists:
            self._seeks_other_lists = False
            warnings.warn(
                f"the lists in the dataset (files, labels, indices) differ between ranks in epoch {epoch}: where they "
                "were shuffled without a common seed, index 7, say, is another sample on every rank, so that some are "
                "trained on twice and others never; shuffle them by a seed and the epoch, alike on every rank, or "
                "leave their order to the loader (shuffle=True). Where ranks only keep notes of their own there, this "
                "does no harm",
                RuntimeWarning,
                stacklevel=2,
            )

    def note_padding(self, step: int) -> None:
        """Take note that samples which count for nothing enter statistics over all ranks, which we do not make."""
        if not self._has_padded:
            self._has_padded = True
            warnings.warn(
                f"rank {self._rank} has no samples in step {step} and takes part with others' in its place, which "
                "SyncBatchNorm counts all the same, so that its statistics and gradients are off in such steps: pass "
                "drop_last=True, or shards of equal length, so that every rank has samples",
                RuntimeWarning,
                stacklevel=2,
            )

    def note_unplanned(self, num_taken: int) -> None:
        """Take note that a script tells what it has drawn for so many batches, and nobody tells it what to draw."""
        if self.seeks_unplanned and num_taken == _UNPLANNED:
            warnings.warn(
                f"{_UNPLANNED} batches by use_batch(), and the model has no loader: gradients are right, but nothing "
                "adapts to the ranks' speeds; draw as many samples as `for local, total in model.batches(batch_size="
                "...)` says, or use a HeteroDataLoader",
                RuntimeWarning,
                stacklevel=2,
            )
