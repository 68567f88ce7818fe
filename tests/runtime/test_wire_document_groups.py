"""What docs/wire.md says of groups is what the code does."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from doc_pages import rows, section, tables
from memory_link import MAX_BYTES, Job, MemoryLink, MemoryNet

from gradbus.runtime.collectives import (
    engine,
    formation,
    group,
    link,
    membership,
    objects,
    operation,
    tensors,
)
from gradbus.runtime.collectives.arithmetic import Arithmetic, ReduceOp
from gradbus.runtime.collectives.data_movement import (
    AllGatherOperation,
    AllToAll,
    Barrier,
    BroadcastOperation,
    Gather,
    Receive,
    Scatter,
    Send,
)
from gradbus.runtime.collectives.engine import wire_name
from gradbus.runtime.collectives.formation import Formation, Member
from gradbus.runtime.collectives.operation import Finished, Operation, OperationKey, OutgoingPart
from gradbus.runtime.collectives.reductions import ReduceScatterOperation, ReduceToRoot, all_reduce, shard_bounds
from gradbus.runtime.errors import CollectiveError
from gradbus.runtime.wire import frames

WORLD, ROOT, NUMEL = 4, 2, 10
OTHERS = [(sender, to) for sender in range(WORLD) for to in range(WORLD) if sender != to]
# "from -> to" in words, as pairs of ranks; None is the topic of all.
ROUTES: dict[str, set[tuple[int, int | None]]] = {
    "each → all": {(rank, None) for rank in range(WORLD)},
    "each → each": set(OTHERS),
    "each → root": {(sender, to) for sender, to in OTHERS if to == ROOT},
    "root → each": {(sender, to) for sender, to in OTHERS if sender == ROOT},
    "root → all": {(ROOT, None)},
    "FROM → TO": {(1, 3)},
    "TO → FROM": {(3, 1)},
    "rank → next, not from the last": {(0, 1), (1, 2), (2, 3)},
    "last → 0 → next, not to the last": {(3, 0), (0, 1), (1, 2)},
}
MEAN = Arithmetic(torch.float64, "mean", WORLD)


@pytest.fixture(scope="module")
def page(root: Path) -> str:
    return (root / "docs" / "wire.md").read_text(encoding="utf-8")


def reduction(algorithm: Any) -> Callable[[int], Operation]:
    return lambda rank: all_reduce(vector(), None, MEAN, algorithm, rank, WORLD)


def vector() -> torch.Tensor:
    return torch.ones(NUMEL, dtype=torch.float64)


def reduce_scatter(rank: int) -> Operation:
    bounds = shard_bounds(NUMEL, WORLD)
    out = torch.empty(bounds[rank + 1] - bounds[rank], dtype=torch.float64)
    return ReduceScatterOperation(vector(), out, bounds, MEAN, rank, WORLD)


def send(rank: int) -> Operation | None:
    if rank == 1:
        return Send(vector(), 3, rank, WORLD)
    return Receive(1, rank, WORLD, MAX_BYTES) if rank == 3 else None


# The operations of the table, and those of its signatures that they have: each is run on all ranks.
CALLS: dict[str, list[Callable[[int], Operation | None]]] = {
    "all_reduce, direct": [reduction("direct")],
    "all_reduce, shards": [reduction("shards")],
    "all_reduce, ring": [reduction("ring")],
    "reduce": [lambda rank: ReduceToRoot(vector(), torch.empty_like(vector()), ROOT, MEAN, rank, WORLD)],
    "reduce_scatter": [reduce_scatter],
    "all_gather": [
        lambda rank: AllGatherOperation(vector(), rank, WORLD, MAX_BYTES),
        lambda rank: AllGatherOperation(b"x", rank, WORLD, MAX_BYTES),
    ],
    "broadcast": [
        lambda rank: BroadcastOperation(b"x" if rank == ROOT else None, ROOT, rank, WORLD, MAX_BYTES),
        lambda rank: BroadcastOperation(vector(), ROOT, rank, WORLD, MAX_BYTES),
    ],
    "gather": [lambda rank: Gather(vector(), ROOT, rank, WORLD, MAX_BYTES)],
    "scatter": [lambda rank: Scatter([vector()] * WORLD if rank == ROOT else None, ROOT, rank, WORLD, MAX_BYTES)],
    "all_to_all": [lambda rank: AllToAll([vector()] * WORLD, rank, WORLD, MAX_BYTES)],
    "send, recv": [send],
    "barrier": [lambda rank: Barrier(rank, WORLD)],
}  # fmt: skip
WORDS = {
    "OP": "mean", "DTYPE": "float64", "/K": f"/{WORLD}", "N": f"{NUMEL}", "ROOT": f"{ROOT}", "reduce->ROOT":
    f"reduce->{ROOT}", "SHAPE": f"{NUMEL}", "FROM": "1", "TO": "3",
}  # fmt: skip


def said(signature: str, kind: str) -> str:
    """A signature of the table with the values of this test."""
    return " ".join({**WORDS, "KIND": kind}.get(word, word) for word in signature.strip("`").split())


class Recorder(MemoryLink):
    """Notes what is sent: signature, meta, part, sender, receiver, bytes."""

    def __init__(self, sent: list[Any], net: MemoryNet, rank: int) -> None:
        super().__init__(net, rank)
        self.sent = sent

    def send(self, key: OperationKey, outgoing: OutgoingPart, finished: Finished) -> Job | None:
        to, part, payload, signature, meta, *_ = outgoing
        self.sent.append((signature, meta, part, self.rank, to, len(payload)))
        return super().send(key, outgoing, finished)


def traffic(make: Callable[[int], Operation | None], *, large_bytes: int = 1 << 30) -> list[Any]:
    """What the ranks send: signature, meta, part, sender, receiver, bytes."""
    sent: list[Any] = []
    net = MemoryNet(WORLD, large_bytes=large_bytes, make_link=partial(Recorder, sent))
    operations = [operation for rank in range(WORLD) if (operation := make(rank)) is not None]
    net.run(*operations)
    net.assert_nothing_is_left()
    return sent


def table_of_operations(page: str) -> dict[str, list[list[str]]]:
    """Rows by operation; a row without a name belongs to the one above."""
    found: dict[str, list[list[str]]] = {}
    for name, *row in rows(section(page, "What each operation sends"), "operation"):
        if name:
            found[last := name] = []
        found[last].append(row)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_every_operation_sends_what_the_table_says(page: str, name: str) -> None:
    table = table_of_operations(page)
    assert table.keys() == CALLS.keys()
    for make in CALLS[name]:
        sent = traffic(make)
        (signature,) = {signature for signature, *_ in sent}
        kind = "bytes" if signature.endswith(" bytes") else "tensor"
        assert signature in [said(text, kind) for text in table[name][0][0].split(" or ")]
        parts = {int(part): ROUTES[route] for _, part, route, _ in table[name]}
        assert {part: {(a, b) for _, _, p, a, b, _ in sent if p == part} for part in parts} == parts
        assert {part for _, _, part, *_ in sent} == parts.keys()
        with_meta = any("with meta" in row[3] for row in table[name])
        assert {meta for _, meta, part, *_ in sent if part == 0} == (
            {f"float64 {NUMEL}"} if with_meta and kind == "tensor" else {""}
        )


def test_sizes_of_what_the_algorithms_send(page: str) -> None:
    assert "its part of the receiver's shard" in page
    shards = [8 * size for size in (3, 3, 2, 2)]
    for make in (reduction("shards"), reduce_scatter):
        assert {(to, size) for *_, part, _, to, size in traffic(make) if part == 0} == set(enumerate(shards))
    assert {(rank, size) for *_, part, rank, _, size in traffic(reduction("shards")) if part == 1} == set(
        enumerate(shards)
    )
    half = Arithmetic(torch.float16, "sum")
    tensor = torch.ones(NUMEL, dtype=torch.float16)
    ring = traffic(lambda rank: all_reduce(tensor, None, half, "ring", rank, WORLD))
    assert {(part, size) for *_, part, _, _, size in ring} == {(0, 4 * NUMEL), (1, 2 * NUMEL)}
    assert "of 4 N bytes" in page
    assert (
        traffic(lambda rank: all_reduce(torch.ones(0), None, Arithmetic(torch.float32, "sum"), "ring", rank, 4)) == []
    )


def test_what_is_large_is_offered_first_and_sent_to_those_who_have_called(page: str) -> None:
    numbers = {row[1]: int(row[0]) for row in rows(section(page, "A COLLECTIVE frame"), "part")}
    assert numbers == {"RTS": operation.RTS, "CTS": operation.CTS, "ACK": operation.ACK}
    assert "above are empty" in section(page, "A COLLECTIVE frame")
    sent = traffic(CALLS["all_gather"][0], large_bytes=1)
    assert {(a, b) for *_, part, a, b, _ in sent if part == operation.RTS} == ROUTES["each → all"]
    assert {(a, b) for *_, part, a, b, _ in sent if part == operation.CTS} == ROUTES["each → each"]
    assert {size for *_, part, _, _, size in sent if part != 0} == {0}
    shards = traffic(reduction("shards"), large_bytes=1)
    assert {(a, b) for *_, part, a, b, _ in shards if part == operation.RTS} == ROUTES["each → each"]


@pytest.mark.parametrize("op", get_args(ReduceOp))
def test_only_a_mean_divides(page: str, op: ReduceOp) -> None:
    assert f"{op}" in section(page, "What each operation sends")
    divisor = 3 if op == "mean" else 1
    dtype = torch.int32 if op in ("band", "bor", "bxor") else torch.float32
    assert Arithmetic(dtype, op, divisor).signature == f"{op} {str(dtype).removeprefix('torch.')} /{divisor}"
    assert "1 without mean" in page


def test_the_hashes_are_computed_as_the_page_says(page: str) -> None:
    text, example = re.search(r"text `(world NUL .*?)` and the hash\s+`0x([0-9a-f]{16})`", page, re.DOTALL).groups()  # type: ignore[union-attr]
    digest = hashlib.blake2b(text.replace(" NUL ", "\0").encode(), digest_size=8).digest()
    assert f"{int.from_bytes(digest, 'little') | 1:016x}" == example
    formation = Formation("world", Member(0, 1, "here"), 2, 0)
    formation.take_hello(1, 0xAB, Formation("world", Member(1, 0xAB, "there"), 2, 0).hello_now())
    assert f"{formation.digest:016x}" == example
    assert f"`{frames.VERSION} {frames.CHUNK_BYTES} {frames.MAX_DESCRIPTORS}`" in section(page, "How a group forms")
    source = inspect.getsource(membership.Membership.__init__)
    assert 'hashlib.blake2b(f"{VERSION} {CHUNK_BYTES} {MAX_DESCRIPTORS}".encode(), digest_size=8)' in source


def test_kept_frames_have_names_as_the_code_makes_them_but_for_the_padding(root: Path) -> None:
    kept = json.loads((root / "tests" / "golden" / "frames.json").read_text(encoding="utf-8"))
    names = {
        "group_tensor": ("shape ü", "all_gather tensor", tensors.describe(torch.ones(2, 3))),
        "group_local": ("grad/0", f"all_reduce shards {Arithmetic(torch.float64, 'mean', 2).signature} 5", ""),
        "group_receipt": ("model", f"broadcast 0 tensor {tensors.describe(torch.ones(10, 784).bfloat16())}", ""),
    }
    for case, parts in names.items():
        frame = frames.parse(bytes.fromhex(kept[case]))
        assert frame.key.name.rstrip("\0") == wire_name(*parts).rstrip("\0")
        assert engine.parts_of(frame.key.name) == engine.parts_of(wire_name(*parts))
        assert (8 + 4 + frames.HEADER_BYTES + len(wire_name(*parts).encode())) % 16 == 0
    assert frames.parse(bytes.fromhex(kept["group_receipt"])).key.part == operation.ACK
    assert tensors.describe(torch.ones(())) == "float32 "


def test_a_name_field_holds_as_much_as_the_page_says(page: str) -> None:
    (room,) = re.findall(r"with padding name, signature and meta have (\d+)", page)
    full = int(room) - len("all_gather tensor") - len("float32 1")
    assert len(wire_name("n" * full, "all_gather tensor", "float32 1")) <= frames.MAX_NAME_BYTES
    with pytest.raises(CollectiveError, match="Use a shorter name"):
        wire_name("n" * (full + 1), "all_gather tensor", "float32 1")


def test_limits_are_those_of_the_code(page: str) -> None:
    limits = {row[0]: row[1].replace(",", "") for row in rows(section(page, "Limits"), "what")}
    defaults = {name: one.default for name, one in inspect.signature(group.join_group).parameters.items()}
    assert limits["ranks of a group"] == str(group.MAX_WORLD)
    assert limits["name of a collective"].startswith(f"{engine.MAX_NAME_BYTES} bytes")
    assert group.GROUP_NAME.pattern == "[A-Za-z0-9_]{1,64}"
    assert limits["name of a group"].startswith("64 of")
    assert limits["dimensions of a tensor"] == str(tensors.MAX_DIMS)
    assert limits["object"] == f"{objects.MAX_OBJECT_BYTES} bytes"
    pending = f"{engine.MAX_PENDING} / (world - 1) but not fewer than {engine.MIN_PENDING}"
    assert limits["collectives of a group that are pending on a rank"] == pending
    assert engine.Engine("", 0, 3, None, early_bytes=800, early_age_s=1).credit.share_bytes == 200  # type: ignore[arg-type]
    assert (
        f"{operation.FRAME_BYTES} bytes for each frame" in limits["payload without RTS, to a rank that has not called"]
    )
    assert (
        f"{defaults['early_bytes']} by default; {engine.MAX_EARLY_FRAMES} frames"
        in limits["frames for calls not made yet"]
    )
    assert limits["payload without RTS"].startswith(f"{operation.RENDEZVOUS_BYTES} bytes or")
    assert engine.Engine("", 0, 8, None, early_bytes=800, early_age_s=1).rendezvous_bytes == 800 / (4 * 8)  # type: ignore[arg-type]
    assert limits["payload of unknown size"].endswith(f"{defaults['max_payload_bytes']} by default")
    assert limits["pairs of round_id and name whose calls are counted"] == (
        f"the latest {engine.MAX_COUNTED_NAMES} of what all ranks call; of `send FROM TO` the latest "
        f"{engine.MAX_COUNTED_NAMES} / (2 world) but not fewer than {engine.MIN_PAIR_NAMES}"
    )


def test_the_times_are_those_of_the_code(page: str) -> None:
    hello = section(page, "GroupHello")
    assert f"a pause that doubles, up to {formation.REPEAT_S:g} s" in " ".join(hello.split())
    assert f"again, at least every {formation.REPEAT_S:g} s" in section(page, "How a group forms")
    assert f"every {membership.REPLY_S:g} s" in hello
    assert formation.NEWS_S == 0.001
    assert "every `world` milliseconds" in " ".join(hello.split())
    assert f"{formation.REPEAT_S * 1000:g} at the most" in " ".join(hello.split())
    assert f"at most {membership.DRAIN_S:g} s" in section(page, "Leaving")
    assert (link.PROBE_ALL, link.PROBE_INBOX) == (0, 1)
    assert membership.CONFLICT_HELLOS == 3
    assert "three times more" in section(page, "How a group forms")


def test_every_reason_for_which_a_group_drops_a_frame_is_explained(page: str) -> None:
    _, table = tables(section(page, "What is refused"), "reason")
    assert {row[0] for row in table} == set(re.findall(r'dropped\["([a-z ]+)"\]', inspect.getsource(engine)))
