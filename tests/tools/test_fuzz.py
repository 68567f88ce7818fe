"""Every target reads what it begins with, and what becomes of that by chance; and the program finds what is broken."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import __main__ as program
from fuzz.catalogue import NAMES, TARGETS
from fuzz.target import RESIDENT_SLACK_BYTES, Target, peaks, remove_folder
from hypothesis import given, settings
from hypothesis import strategies as st

from gradbus.runtime.wire import frames

EXAMPLES = 60  # of each target; `make fuzz` tries millions
HAVE_ATHERIS = importlib.util.find_spec("atheris") is not None


@pytest.fixture(autouse=True, scope="module")
def _no_folder_is_left() -> Iterator[None]:
    yield
    remove_folder()


def changed(seed: bytes, dice: random.Random) -> bytes:
    """Some bytes put in, taken out, repeated or set to what is often a limit."""
    data = bytearray(seed)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(5):
            case 0:
                data[at : at + 1] = bytes([dice.choice((0, 1, 0x7F, 0x80, 0xFF, dice.randrange(256)))])
            case 1:
                data[at : at + dice.choice((1, 4, 8))] = b""
            case 2:
                data[at:at] = dice.choice((b"\xff" * 4, b"\0" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f"))
            case 3:
                data[at:at] = data[at : at + dice.choice((2, 16, 64))]
            case _:
                del data[at:]
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_no_seed_takes_more_memory_than_is_stated(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()
    assert all(len(seed) <= target.max_len for seed in seeds)
    assert max(peaks(target, iter(seeds))) <= target.limit_bytes


def test_the_seeds_of_frames_are_frames_with_payload_and_with_one_and_with_many_descriptors() -> None:
    read = [frames.parse(seed) for seed in TARGETS["frame"].seeds()]
    shared = [len(frame.data) // frames.DESCRIPTOR_BYTES for frame in read if frame.flags & frames.Flags.SHARED]
    assert shared == [1, 2, frames.MAX_DESCRIPTORS]
    assert {frame.key.kind for frame in read if not frame.flags & frames.Flags.SHARED} == set(frames.Kind)


@pytest.mark.parametrize("name", NAMES)
def test_changed_seeds_break_no_parser(name: str) -> None:
    target = TARGETS[name]
    seeds = target.seeds()

    @settings(derandomize=True, max_examples=EXAMPLES, deadline=None)
    @given(seed=st.sampled_from(seeds), dice=st.randoms(use_true_random=False))
    def read(seed: bytes, dice: random.Random) -> None:
        target.read(changed(seed, dice))

    read()


@pytest.mark.parametrize("name", NAMES)
@settings(derandomize=True, max_examples=20, deadline=None)
@given(data=st.binary(max_size=300))
def test_bytes_of_chance_break_no_parser(name: str, data: bytes) -> None:
    TARGETS[name].read(data)


def test_the_memory_of_an_input_is_what_it_takes_at_most() -> None:
    target = Target(lambda data: [bytes(1000 * size) for size in data].clear(), 1000, lambda: [b""])
    found = list(peaks(target, iter([b"\1", b"\x7d\x7d", b""])))
    assert found[0] < 10_000
    assert 250_000 <= found[1] < 260_000
    assert found[2] < 10_000


MEASURED = """
import torch
from fuzz.target import Target, peaks, resident_peaks

target = Target(lambda data: torch.ones(len(data) << 18).sum().item() and None, 1000, lambda: [b""])
print(*resident_peaks(target, iter([b"", bytes(60), b""])), *peaks(target, iter([bytes(30)])))
"""


def test_memory_that_python_does_not_count_is_seen_as_well() -> None:
    """In a process whose allocator gives back what is free, as the program starts its own."""
    environment = {**os.environ, **program.GIVES_BACK, "PYTHONPATH": str(program.TOOLS)}
    done = subprocess.run(
        [sys.executable, "-P", "-c", MEASURED], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    before, large, after, counted = map(int, done.stdout.split())
    assert large > 56 << 20
    assert max(before, after) < RESIDENT_SLACK_BYTES
    assert counted < 100_000


def test_too_much_memory_of_either_kind_is_a_finding() -> None:
    limit = TARGETS["frame"].limit_bytes
    assert program.FuzzOutcome("frame", peak_bytes=2 * limit, resident_bytes=2 * limit).ok
    assert program.FuzzOutcome("frame", peak_bytes=2 * limit + 1, worst="this").too_much == "this"
    resident = 2 * limit + RESIDENT_SLACK_BYTES + 1
    assert program.FuzzOutcome("frame", resident_bytes=resident, swollen="that").too_much == "that"


def test_without_atheris_the_program_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert program.main([]) == 2
    assert re.search(r"pip install .*'atheris>=3\.0'", capsys.readouterr().err)


def test_a_target_that_is_not_there_is_named_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        program.main(["framed"])
    assert ended.value.code == 2
    assert "no target 'framed'; there are frame, " in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.skipif(not HAVE_ATHERIS, reason="there is no atheris (make setup-fuzz)")
def test_the_program_finds_what_is_broken_and_keeps_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # It takes a moment, and ends with what is found; only a machine that is busy otherwise needs more of the time.
    assert program.main(["broken", "--seconds", "60", "--folder", str(tmp_path)]) == 1
    said = capsys.readouterr().out
    assert "ValueError: as it should" in said
    (crash,) = (tmp_path / "crashes" / "broken").glob("crash-*")  # an input that took long is kept beside it
    assert crash.read_bytes().startswith(b"!")
