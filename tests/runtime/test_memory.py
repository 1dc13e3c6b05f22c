"""How large a batch memory holds, by scripted memory; and running out of it, by asking for more than there can be."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from dataclasses import dataclass

import memory_cases as cases
import pytest
import torch
from ranks import run_ranks
from told import Raised, run_cases, values

from cannikin.core.values import NO_MAX
from cannikin.runtime.memory import MemoryGauge, is_out_of_memory, largest_batch


@dataclass
class ScriptedMemory:
    """A device that needs `base` bytes, and `per_sample` for each sample of a step."""

    base: int = 1000
    per_sample: int = 100
    end: int = 20_000
    top: int = 0
    waste: float = 1.0
    num_reads: int = 0

    def allocated(self) -> int:
        self.num_reads += 1
        return self.base

    def peak(self) -> int:
        self.num_reads += 1
        return max(self.top, self.base)

    def peak_taken(self) -> int:
        return int(self.waste * self.peak())

    def limit(self) -> int:
        return self.end

    def release(self) -> None:
        """Nothing is cached."""

    def use(self, num_bytes: int) -> None:
        """As much as this at once, and given back."""
        self.top = max(self.top, num_bytes)


def train(gauge: MemoryGauge, memory: ScriptedMemory, *batches: int) -> None:
    for batch in batches:
        gauge.begin_step(batch)
        memory.use(memory.base + batch * memory.per_sample)
        gauge.end_step(batch)


def warmed_up(memory: ScriptedMemory) -> MemoryGauge:
    """Past the first steps, in which the optimizer has no state yet; their peak was lower than that of the start."""
    gauge = MemoryGauge(memory)
    memory.use(memory.base + 2 * memory.per_sample)
    train(gauge, memory, 1, 1)
    return gauge


def test_the_largest_batch_is_where_the_line_through_the_peaks_meets_nine_tenths_of_the_memory():
    assert largest_batch([0, 32, 64], [1000, 4200, 7400], 20_000) == 170
    assert largest_batch([0, 32], [1000, 4200], 20_000) == 170


def test_what_went_through_once_is_never_beyond_the_bound():
    assert largest_batch([0, 32, 64], [1000, 4200, 7400], 5000) == 64


@pytest.mark.parametrize(
    ("batches", "peaks"), [([8], [1000]), ([8, 8], [1000, 1100]), ([0, 8], [1000, 1000]), ([0, 8], [1000, 900])]
)
def test_peaks_that_say_nothing_set_no_bound(batches, peaks):
    assert largest_batch(batches, peaks, 20_000) == NO_MAX


def test_the_gauge_learns_the_bound_from_its_first_larger_batch():
    memory = ScriptedMemory()
    gauge = warmed_up(memory)
    assert gauge.max_batch == NO_MAX
    train(gauge, memory, 16)
    assert gauge.max_batch == (18_000 - 1000) // 100
    train(gauge, memory, 32, 64)
    assert gauge.max_batch == 170
    assert gauge.largest == 64


def test_what_the_second_step_needs_teaches_nothing_as_state_may_have_come():
    memory = ScriptedMemory()
    gauge = MemoryGauge(memory)
    train(gauge, memory, 16)
    bound, memory.per_sample = gauge.max_batch, 400
    train(gauge, memory, 32)
    assert (gauge.max_batch, gauge.largest) == (bound, 0)


def test_steps_with_batches_seen_before_read_nothing():
    memory = ScriptedMemory()
    gauge = warmed_up(memory)
    train(gauge, memory, 16)
    num_reads, bound = memory.num_reads, gauge.max_batch
    memory.per_sample = 400
    train(gauge, memory, 16, 8, 16)
    assert (memory.num_reads, gauge.max_batch) == (num_reads, bound)


def test_a_step_that_did_not_raise_the_peak_is_no_point():
    memory = ScriptedMemory()
    gauge = warmed_up(memory)
    memory.use(9000)  # an evaluation with a large batch
    train(gauge, memory, 16, 64)
    assert gauge.max_batch == NO_MAX
    assert gauge.largest == 64, "it went through all the same"
    train(gauge, memory, 128)
    assert gauge.max_batch == 170


def test_a_batch_that_went_through_is_never_beyond_the_bound_though_its_peak_was_not_seen():
    memory = ScriptedMemory()
    gauge = warmed_up(memory)
    train(gauge, memory, 100)
    assert gauge.max_batch == 170
    memory.use(30_000)  # an evaluation
    train(gauge, memory, 190)
    assert gauge.max_batch == 190, "else the log would say that it ran out of memory"
    gauge.hold(240, 121, held_bytes=121 * 120, base_bytes=1000)
    assert gauge.max_batch == 190


def test_before_peaks_are_known_the_first_step_bounds_batches_with_room_for_the_state_to_come():
    memory = ScriptedMemory()
    gauge = MemoryGauge(memory, later_bytes=3000)
    train(gauge, memory, 64)
    assert gauge.max_batch == 140, "(0.9 of 20,000 - 1000 - 3000) / 100"
    train(gauge, memory, 64, 100)
    assert gauge.max_batch == 170, "as soon as peaks are known, these say it better"


def test_gaps_between_tensors_in_the_first_step_leave_less_room_for_good():
    memory = ScriptedMemory(waste=1.2)
    gauge = MemoryGauge(memory)
    train(gauge, memory, 64)
    assert gauge.max_batch == 140, "(0.9 of 20,000 / 1.2 - 1000) / 100"
    memory.waste = 3.0  # blocks of other sizes that lie idle, which torch gives back before it runs out
    train(gauge, memory, 64, 100)
    assert gauge.max_batch == 140


def test_a_script_that_fits_barely_is_left_alone_and_a_plan_that_would_is_cut():
    memory = ScriptedMemory()
    gauge = MemoryGauge(memory, later_bytes=3000)
    assert gauge.leaves_room(180, 1000, 0), "nothing is known yet but what forward has taken"
    train(gauge, memory, 180)
    assert gauge.leaves_room(180, 1000, 0), "as in the step before"

    gauge = MemoryGauge(memory := ScriptedMemory(), later_bytes=3000)
    train(gauge, memory, 100)
    assert gauge.leaves_room(140, 1000, 0)
    assert not gauge.leaves_room(180, 1000, 0)


def test_a_step_that_fails_leaves_no_point():
    memory = ScriptedMemory()
    gauge = warmed_up(memory)
    gauge.begin_step(150)
    memory.use(16_000)
    train(gauge, memory, 16)
    assert (gauge.max_batch, gauge.largest) == (NO_MAX, 16)


def test_without_memory_to_read_there_is_no_bound_but_the_largest_batch_is_known():
    gauge = MemoryGauge(None)
    for batch in (3, 8, 5):
        gauge.begin_step(batch)
        gauge.end_step(batch)
    assert (gauge.max_batch, gauge.largest) == (NO_MAX, 8)
    assert "rank 2 ran out of memory with a local batch of 12 (the largest that went through is 8)" in (
        gauge.advice(2, 12)
    )
    assert "local_bounds=(1, 8)" in gauge.advice(2, 12)
    assert "local_bounds=(1, 4)" in gauge.advice(2, 8), "8 went through once, but no longer does"


def test_advice_before_any_step_halves_the_batch():
    gauge = MemoryGauge(None)
    assert "none has gone through yet" in gauge.advice(0, 7)
    assert "local_bounds=(1, 3)" in gauge.advice(0, 7)
    assert "local_bounds=(1, 1)" in gauge.advice(0, 1)


def test_a_real_lack_of_memory_is_known_from_other_errors():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(cases.TOO_MUCH)
    assert is_out_of_memory(caught.value)
    with pytest.raises(MemoryError) as refused:
        bytearray(2**60)
    assert is_out_of_memory(refused.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("expected a tensor"))
    assert not is_out_of_memory(ValueError("can't allocate memory"))


@pytest.fixture(scope="module")
def told():
    names = ("in_forward", "at_once", "caught_by_the_user", "in_evaluation")
    return run_ranks(run_cases, 2, {name: getattr(cases, f"out_of_memory_{name}") for name in names})


def test_running_out_of_memory_in_forward_says_which_rank_which_batch_and_what_bound_to_set(told):
    for rank, (batch, bound) in enumerate([(5, 3), (2, 1)]):
        raised = told[rank]["in_forward"]
        assert isinstance(raised, Raised)
        (note,) = raised.notes
        assert f"rank {rank} ran out of memory with a local batch of {batch}" in note
        assert "(the largest that went through is 3)" in note
        assert f"local_bounds=(1, {bound})" in note
        assert "micro_batches" in note
        assert note in raised.trace, "in the words that a person sees"


def test_running_out_of_memory_in_the_first_step_says_that_none_has_gone_through(told):
    for answers in told:
        (note,) = answers["at_once"].notes
        assert "local batch of 3 (none has gone through yet)" in note


def test_an_error_that_the_user_catches_has_the_note_once(told):
    for rank, notes in enumerate(values(told, "caught_by_the_user")):
        assert len(notes) == 1
        assert notes[0].startswith(f"cannikin: rank {rank} ran out of memory")


def test_running_out_of_memory_in_an_evaluation_is_not_blamed_on_the_local_batch(told):
    for answers in told:
        raised = answers["in_evaluation"]
        assert isinstance(raised, Raised)
        assert is_out_of_memory(RuntimeError(raised.text))
        assert raised.notes == ()


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from cannikin import HeteroDataLoader, HeteroDataParallel


class Hungry(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.empty(2**50)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def forward(self, inputs):
        return Hungry.apply(self.net(inputs))


net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
model = HeteroDataParallel(net, optimizer)
for (inputs,) in HeteroDataLoader(TensorDataset(torch.randn(60, 3)), model=model, batch_size=6):
    model(inputs).mean().backward()
    optimizer.step()
"""


def test_a_script_that_runs_out_of_memory_in_backward_ends_with_the_advice(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1, done.stderr
    assert "allocate memory" in done.stderr
    assert "cannikin: rank 0 ran out of memory with a local batch of 6 (none has gone through yet)" in done.stderr
    assert done.stderr.count("local_bounds=(1, 3)") == 1
