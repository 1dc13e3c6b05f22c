"""Files of snapshots: what comes back, and that a damaged one never does."""

from __future__ import annotations

import os
import random
from collections import Counter, OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch

from cannikin.errors import InvalidInputError, StateError
from cannikin.runtime.snapshot_file import (
    HostRow,
    SnapshotName,
    list_snapshots,
    open_snapshot,
    put_together,
    read_chunks,
    take_apart,
    write_snapshot,
)


def save(path: Path, tree: object, host: HostRow | None = None) -> int:
    """Write a state as a snapshot does, and return the file's length."""
    host = host or HostRow()
    skeleton, tensors = take_apart(tree)
    host.copy(tensors, lambda tensor: False)
    host.wait()
    return write_snapshot(path, skeleton, host.layout, host.row)


def load(path: Path):
    """Read all of a file, and open it."""
    row = torch.empty(path.stat().st_size, dtype=torch.uint8)
    for _ in read_chunks(path, row):
        pass
    opened = open_snapshot(row)
    return opened.part(opened.state)


def trained() -> dict[str, object]:
    """The states of a small network, its optimizer and its scheduler after a step."""
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(net.parameters(), amsgrad=True)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    net(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    return {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


def assert_same(one: object, other: object) -> None:
    if isinstance(one, torch.Tensor):
        assert isinstance(other, torch.Tensor)
        assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        assert torch.equal(one, other)
        return
    assert type(one) is type(other)
    if isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_same(*pair)
    else:
        assert one == other


def test_states_of_torch_come_back_as_they_were(tmp_path):
    state = trained()
    save(tmp_path / "one", state)
    loaded = load(tmp_path / "one")
    assert_same(state, loaded)
    assert loaded["net"]._metadata == state["net"]._metadata


def test_tensors_of_every_kind_come_back_with_their_order_in_memory(tmp_path):
    shared = torch.arange(12.0).reshape(3, 4)
    state = {
        "empty": torch.empty(0, 3),
        "number": torch.tensor(7),
        "half": torch.randn(3).bfloat16(),
        "truth": torch.tensor([True, False]),
        "complex": torch.randn(2, dtype=torch.complex64),
        "images": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "turned": shared.T,
        "again": shared.T,
    }
    save(tmp_path / "one", state)
    assert_same(state, load(tmp_path / "one"))


def test_plain_values_come_back_and_numbers_of_numpy_become_pythons(tmp_path):
    plain = {1: (2, "three", None, b"4"), "set": {5}, "big": 2**100, "inf": float("inf"), "count": Counter("aab")}
    state = {**plain, "ordered": OrderedDict(a=1), "dtype": torch.float16}
    save(tmp_path / "one", {**state, "numpy": np.float64(0.5), "size": torch.Size([2, 3])})
    assert load(tmp_path / "one") == {**state, "numpy": 0.5, "size": (2, 3)}


def test_tied_weights_are_written_once(tmp_path):
    weights = torch.randn(1000)
    once = save(tmp_path / "one", {"a": weights})
    assert save(tmp_path / "two", {"a": weights, "b": weights.view(1000)}) - once < 1000


@pytest.mark.parametrize("value", [Path("x"), np.zeros(2), object(), torch.zeros(2).to_sparse()])
def test_what_would_need_foreign_code_to_be_read_is_refused_by_name(value):
    with pytest.raises(InvalidInputError, match=r"the state ema/inner is a .*let state_dict\(\) return those"):
        take_apart({"ema": {"inner": [value]}})


def test_memory_is_used_again_and_holds_the_newest_values(tmp_path):
    host, weights = HostRow(), torch.zeros(100)
    save(tmp_path / "one", {"weights": weights}, host)
    first = host.row.data_ptr()
    save(tmp_path / "two", {"weights": weights + 1}, host)
    assert host.row.data_ptr() == first
    assert (load(tmp_path / "one")["weights"].mean(), load(tmp_path / "two")["weights"].mean()) == (0, 1)


# Damage


def test_a_byte_that_was_changed_is_noticed_wherever_it_is(tmp_path):
    path = tmp_path / "one"
    length = save(path, trained())
    whole = path.read_bytes()
    draw = random.Random(0)
    for place in [0, 15, 16, 24, 31, 32, length - 33, length - 1, *(draw.randrange(length) for _ in range(200))]:
        torn = bytearray(whole)
        torn[place] ^= draw.randrange(1, 256)
        path.write_bytes(torn)
        with pytest.raises(StateError, match=r"checksum|not a snapshot|bytes of"):
            load(path)


def test_a_file_that_was_cut_off_is_noticed_at_any_length(tmp_path):
    path = tmp_path / "one"
    length = save(path, trained())
    whole = path.read_bytes()
    draw = random.Random(1)
    for size in [0, 1, 31, 32, 63, 64, length - 1, *(draw.randrange(length) for _ in range(200))]:
        path.write_bytes(whole[:size])
        with pytest.raises(StateError, match="bytes"):
            load(path)
    path.write_bytes(whole + b"\0")
    with pytest.raises(StateError, match="bytes of"):
        load(path)


def test_a_file_that_cannot_be_read_is_like_a_damaged_one(tmp_path):
    row = torch.ones(100, dtype=torch.uint8)
    assert sum(len(piece) for piece in read_chunks(tmp_path / "missing", row)) == 100
    with pytest.raises(StateError):
        open_snapshot(row)


def test_a_write_that_fails_leaves_nothing_behind_and_the_old_file_in_place(tmp_path, monkeypatch):
    save(tmp_path / "one", {"a": 1})

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        save(tmp_path / "one", {"a": 2})
    assert os.listdir(tmp_path) == ["one"]
    assert load(tmp_path / "one") == {"a": 1}


def test_a_link_that_waits_where_the_file_is_written_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / f".one.{os.getpid()}.part").symlink_to(tmp_path / "victim")
    with pytest.raises(FileExistsError):
        save(tmp_path / "one", {"a": 1})
    assert (tmp_path / "victim").read_text() == "mine"


# Names


def test_only_whole_snapshots_are_listed_newest_first(tmp_path):
    names = [SnapshotName(step, "0123456789abcdef") for step in (9, 100, 1)]
    for name in (*names, f".{names[0]}.77.part", "step-1.snapshot", "notes.txt"):
        (tmp_path / str(name)).touch()
    assert [name.step for name in list_snapshots(tmp_path)] == [100, 9, 1]
    assert list_snapshots(tmp_path / "missing") == []


def test_states_without_tensors_are_put_together_as_they_were():
    skeleton, tensors = take_apart({"a": [1, (2,)]})
    assert (put_together(skeleton, tensors.__getitem__), tensors) == ({"a": [1, (2,)]}, [])
