"""Lines of several processes in one stream."""

from __future__ import annotations

import io
import itertools
import os

from hypothesis import given
from hypothesis import strategies as st

from cannikin.lab.launch import Lines, Outputs


@given(
    data=st.binary(max_size=60).filter(lambda data: b"\r" not in data), cuts=st.lists(st.integers(0, 60), max_size=5)
)
def test_lines_come_out_whole_wherever_the_stream_was_cut(data, cuts):
    lines = Lines("> ")
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    shown = b"".join(lines.feed(data[a:b]) for a, b in itertools.pairwise(bounds)) + lines.rest()
    whole = data if data.endswith(b"\n") or not data else data + b"\n"
    assert shown == b"".join(b"> " + line + b"\n" for line in whole.split(b"\n")[:-1])


def test_of_a_progress_bar_its_last_state_is_left():
    lines = Lines("> ")
    assert lines.feed(b"\r 10%\r 50%") == b""
    assert lines.feed(b"\r100%\r\nnext\n") == b"> 100%\n> next\n"


def test_a_line_without_an_end_does_not_fill_the_memory():
    lines = Lines("> ")
    assert len(lines.feed(b"x" * 70_000)) > 70_000
    assert lines.rest() == b""


def test_streams_are_kept_apart_and_the_last_line_needs_no_end():
    outputs, out, err = Outputs(), io.BytesIO(), io.BytesIO()
    ends = []
    for prefix, stream in (("[a] ", out), ("[b] ", err)):
        read, write = os.pipe()
        outputs.add(read, prefix, stream)
        ends.append(write)
    os.write(ends[0], b"one\ntw")
    os.write(ends[1], b"three")
    os.close(ends[1])
    assert outputs.pump(1.0)
    os.write(ends[0], b"o\n")
    outputs.close()
    os.close(ends[0])
    assert out.getvalue() == b"[a] one\n[a] two\n"
    assert err.getvalue() == b"[b] three\n"
