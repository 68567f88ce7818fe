"""docs/collectives.md says what the code does, and its examples run as they are."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import pytest
import torch
from doc_pages import python_blocks, rows, section, tables

import gradbus
from gradbus.runtime import errors
from gradbus.runtime.bus.background import settings_from_environment
from gradbus.runtime.collectives import (
    ALGORITHMS,
    CollectiveHandle,
    Group,
    GroupStats,
    engine,
    link,
    membership,
    objects,
    operation,
)
from gradbus.runtime.collectives.arithmetic import Arithmetic, ReduceOp
from gradbus.runtime.collectives.reductions import SMALL_BYTES, choose
from gradbus.runtime.config.bus import BusSettings
from gradbus.runtime.config.settings import Settings, load_settings
from gradbus.runtime.network.network_config import NetworkConfig
from gradbus.runtime.shm import layout, transport
from gradbus.runtime.wire.frames import CHUNK_BYTES

MIB = 1 << 20
LOG_LINE = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d \[")


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "collectives.md").read_text(encoding="utf-8")


# The examples


def run(page: str, number: int, folder: Path, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What an example prints, by line, without log lines: warnings of a busy machine are not the example's."""
    script = folder / "example.py"
    script.write_text(python_blocks(page)[number], encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    return [line for line in capsys.readouterr().out.splitlines() if not LOG_LINE.match(line)]


def test_there_are_three_examples(page: str) -> None:
    assert len(python_blocks(page)) == 3


def test_the_first_example_shows_some_collectives(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gives = "({'lr': 0.1}, [1.5, 3.0], [b'I am rank 0', b'I am rank 1'])"
    assert run(page, 0, tmp_path, capsys) == [f"rank 0: {gives}", f"rank 1: {gives}"]


def test_the_second_example_forms_a_group_anew(page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(page, 1, tmp_path, capsys)
    assert lines[-1] == "in the end: [6.0, 6.0, 6.0] [6.0, 6.0, 6.0]"
    first, second = sorted(lines[:-1])
    assert first.startswith("rank 0 goes on without ranks (1,): {1: 'failed with OSError: the disk is full, at ")
    assert second == "rank 1 has a problem of its own: the disk is full"


def test_the_third_example_averages_gradients_while_the_backward_pass_goes_on(
    page: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(page, 2, tmp_path, capsys) == ["equal to the bit: True"]


# The tables


def call_of(function: Any) -> str:
    """Its signature as the page writes it: without types and without what all collectives take."""
    signature = inspect.signature(function)
    kept = [
        one.replace(annotation=inspect.Parameter.empty)
        for name, one in signature.parameters.items()
        if name not in ("self", "round_id", "timeout_s", "options")
    ]
    if kept[-1].kind is inspect.Parameter.VAR_KEYWORD:
        kept.pop()
    text = str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))
    return f"{function.__name__}{text}".replace("'", '"')


def collectives() -> dict[str, Any]:
    """The methods of a group that give a handle, by name."""
    methods = inspect.getmembers(Group, inspect.isfunction)
    hidden = [name for name, _ in methods if name.startswith("_")]
    return {name: method for name, method in methods if name not in ("subgroup", "calls_may_block", "at_step", *hidden)}


def test_every_collective_is_there_with_its_arguments(page: str) -> None:
    told = [row[0].strip("`") for title in ("What there is", "Objects") for row in rows(section(page, title), "call")]
    assert sorted(told) == sorted(map(call_of, collectives().values()))
    for name, method in collectives().items():
        if not name.endswith("_object"):
            assert {"round_id", "timeout_s"} <= inspect.signature(method).parameters.keys()


DTYPES = {
    "floating": (torch.float16, torch.bfloat16, torch.float32, torch.float64),
    "complex": (torch.complex64, torch.complex128),
    "whole": tuple(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "bool": (torch.bool,),
}


def is_known(op: ReduceOp, dtype: torch.dtype) -> bool:
    try:
        Arithmetic(dtype, op)
    except ValueError:
        return False
    return True


def test_every_reduction_is_there_with_the_dtypes_that_it_takes(page: str) -> None:
    told = rows(section(page, "Reductions"), "`op`")
    assert [row[0].strip("`") for row in told] == list(get_args(ReduceOp))
    for op, (_, _, *columns) in zip(get_args(ReduceOp), told, strict=True):
        for (kind, dtypes), cell in zip(DTYPES.items(), columns, strict=True):
            assert {is_known(op, dtype) for dtype in dtypes} == {cell.startswith("yes")}, (op, kind)
    assert not any(is_known(op, dtype) for op in get_args(ReduceOp) for dtype in (torch.float8_e4m3fn, torch.complex32))


def test_sum_and_product_of_bool_are_or_and_and() -> None:
    pairs = np.array([[False, False, True, True], [False, True, False, True]])
    for op, expected in (("sum", pairs[0] | pairs[1]), ("product", pairs[0] & pairs[1])):
        out = np.empty(4, np.uint8)
        Arithmetic(torch.bool, cast("ReduceOp", op)).reduce([row.view(np.uint8) for row in pairs], out)
        assert out.tolist() == expected.tolist()


def test_the_defaults_of_a_group_are_those_of_the_code(page: str) -> None:
    told: dict[str, str] = {}
    for names, default, _ in rows(section(page, "A group"), "argument of `join_group`"):
        told |= dict.fromkeys(re.findall(r"`(\w+)`", names), default.strip('`"'))
    defaults = {name: one.default for name, one in inspect.signature(gradbus.join_group).parameters.items()}
    assert told.keys() == defaults.keys()
    for name, default in defaults.items():
        if default is inspect.Parameter.empty:
            assert told[name] == ""
        elif default is None:
            assert told[name] == "None"
        else:
            assert type(default)(told[name]) == default


def test_facts_of_groups_and_handles_are_there(page: str) -> None:
    counted = rows(section(page, "A group"), "`group.stats`")
    assert {name for row in counted for name in re.findall(r"`(\w+)`", row[0])} == set(GroupStats.__slots__)
    for name in re.findall(r"`group\.(\w+)", page):
        assert name in ("rank", "world", "name") or hasattr(Group, name), name
    told = set(re.findall(r"`handle\.(\w+)", page))
    assert told == {name for name in dir(CollectiveHandle) if not name.startswith("_")} - {"arm"}


def test_every_error_is_one_and_has_what_the_page_says(page: str) -> None:
    for name, when, what in rows(section(page, "Errors"), "error"):
        kind = getattr(errors, name.strip("`"), None) or ValueError
        assert issubclass(kind, Exception), name
        for attribute in re.findall(r"`\.(\w+)`", when + what):
            assert attribute in inspect.getsource(kind), (name, attribute)
    assert issubclass(errors.CollectiveTimeout, errors.CollectiveError)
    assert issubclass(errors.PeerLost, errors.CollectiveError)
    for kind in (errors.CollectiveTimeout, errors.BarrierTimeout, errors.WriteTimeout):
        assert issubclass(kind, TimeoutError)


def test_the_algorithms_are_those_of_the_code(page: str) -> None:
    told = [row[0].strip("`") for row in rows(section(page, "Algorithms, and why their bits are equal"), "algorithm")]
    assert sorted([*told, "auto"]) == sorted(ALGORITHMS)
    assert f"up to {SMALL_BYTES // 1024} KiB, else `shards`" in page
    assert [choose("auto", 2, 1 << 40), choose("auto", 3, SMALL_BYTES), choose("auto", 3, SMALL_BYTES + 1)] == [
        "direct",
        "direct",
        "shards",
    ]


def test_numbers_are_those_of_the_code(page: str) -> None:
    text = " ".join(page.split())
    assert f"more than {operation.RENDEZVOUS_BYTES // MIB} MiB (or" in text
    assert f"at most {engine.MAX_NAME_BYTES} bytes" in text
    assert (
        f"the latest {engine.MAX_COUNTED_NAMES} pairs are remembered of what all ranks call, "
        f"{engine.MAX_COUNTED_NAMES} / (2 world), "
        f"but not fewer than {engine.MIN_PAIR_NAMES}, of the messages from one rank to another"
    ) in text
    assert f"At most {engine.MAX_PENDING} / (world - 1) collectives, or {engine.MIN_PENDING}, may be pending" in text
    assert f"at most {objects.MAX_OBJECT_BYTES // MIB} MiB as msgpack" in text
    assert f"What is small ({link.INLINE_BYTES // 1024} KiB)" in text
    assert f"two above {CHUNK_BYTES // MIB} MiB" in text
    leases = [NetworkConfig(profile=profile).effective_lease_s for profile in ("loopback", "network")]
    assert "by default {:g} s on one machine and {:g} s in a network".format(*leases) in text


def test_what_it_says_of_shared_memory_is_so(page: str) -> None:
    text = " ".join(section(page, "Shared memory").split())
    assert f"Payloads of {link.SHARED_BYTES // 1024} KiB or more are copied" in text
    assert f"in chunks of {CHUNK_BYTES // MIB} MiB" in text
    assert f"at most {transport.MAX_WORLD} ranks" in text
    assert f"has {layout.SLOTS} chunks of {CHUNK_BYTES // MIB} MiB for what it sends" in text
    assert f"and {layout.RING_BYTES // 1024} KiB for the letters" in text
    wait_ms = link.SLOT_WAIT_S * 1000
    assert f"when none has come back for {wait_ms:g} ms" in text
    assert f"none for this payload for {link.STARVED * wait_ms:g} ms, chunks go over DDS" in text
    assert f"More than {layout.SLOTS + 1} ranks on one machine" in text
    assert "`no shared memory`" in text
    assert '"no shared memory"' in inspect.getsource(membership)


def test_shared_memory_is_switched_off_as_the_page_it_links_to_says(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    operations = (root / "docs" / "operations.md").read_text(encoding="utf-8")
    ways = [re.findall(r"`([^`]+)`", how) for _, how in rows(section(operations, "Shared memory"), "where")]
    in_program, in_file, in_environment = ways
    for call in in_program:
        tree: Any = ast.parse(call, mode="eval").body
        arguments = {one.arg: ast.literal_eval(one.value) for one in tree.keywords}
        function = {"gradbus.connect": gradbus.connect, "gradbus.NetworkConfig": NetworkConfig}[ast.unparse(tree.func)]
        assert inspect.signature(function).bind(**arguments).arguments == {"shared_memory": False}
    assert NetworkConfig().shared_memory
    assert in_file[0] == "bus.shared_memory"
    (tmp_path / "run.json").write_text(in_file[1], encoding="utf-8")
    assert load_settings(Program, tmp_path / "run.json", environment={}).bus.shared_memory is False
    assert Program().bus.shared_memory
    name, _, value = in_environment[-1].partition("=")
    assert load_settings(Program, environment={name: value}).bus.shared_memory is False
    monkeypatch.setenv(name, value)
    assert settings_from_environment().shared_memory is False


class Program(Settings):
    """The settings of some program."""

    bus: BusSettings = BusSettings()


def test_every_link_leads_somewhere(root: Path, page: str) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]+)(?:#([^)]+))?\)", page):
        linked = (root / "docs" / target).read_text(encoding="utf-8")
        titles = {
            re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", linked, re.M)
        }
        assert not anchor or anchor in titles, (target, anchor)
    assert len(tables(page, "call")) == 2
