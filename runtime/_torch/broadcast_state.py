"""Parameters and optimizer state of one rank for all others: when training begins, or goes on from a checkpoint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradbus.runtime.collectives.objects import pack
from gradbus.runtime.collectives.tensors import check_sendable, describe, empty_like_described
from gradbus.runtime.errors import CollectiveError
from gradbus.torch.backend import DdsBackend
from gradbus.torch.functions import check_reachable, check_root, current, gather_objects, share_object, start_broadcast

# What a rank takes as the optimizer state of another one, in bytes: Adam has 2 x the parameters, LBFGS up to 200 x.
_STATE_PER_PARAMETERS = 256
_STATE_AT_LEAST_BYTES = 64 << 20
_MAX_DEPTH = 32
_SENDABLE_KEYS = "numbers of 64 bits, text, bytes and None can be keys"
_AGREED, _PARAMETERS, _STATE = "agreed", "parameter", "state"  # spaces of names

Parameters = Mapping[str, Any] | Iterable[tuple[str, Any]]


def broadcast_parameters(params: Parameters, root_rank: int = 0) -> None:
    """Give all ranks the values of the root, in place.

    Args:
        params: ``model.state_dict()`` or ``model.named_parameters()``.

    Raises:
        ValueError: something is no tensor that can be sent; or, on all ranks, their names, shapes and dtypes differ.
        DistBackendError: a rank is lost or late.
    """
    backend = current()
    check_root(root_rank, backend.group.world)
    tensors = dict(params.items() if isinstance(params, Mapping) else params)
    for name, tensor in tensors.items():
        what = f"broadcast_parameters: {name!r}"
        check_reachable(tensor, what if isinstance(tensor, Tensor) else f"{what} (use broadcast_object for it)")
        check_sendable(tensor)
    _check_equal(backend, {name: describe(tensor) for name, tensor in tensors.items()})
    _broadcast_all(backend, tensors.items(), _PARAMETERS, root_rank)


def _broadcast_all(backend: DdsBackend, named: Iterable[tuple[str, Tensor]], space: str, root_rank: int) -> None:
    for handle in [start_broadcast(backend, tensor, space, name, root_rank) for name, tensor in named]:
        handle.wait()


def _check_equal(backend: DdsBackend, mine: dict[str, str]) -> None:
    """Raises ValueError on all ranks: their names, dtypes and shapes are not the same."""
    what, rank = "broadcast_parameters", backend.group.rank
    text = "\n".join(f"{name}\0{mine[name]}" for name in sorted(mine))
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    if len(set(gather_objects(backend, digest, (_AGREED, "parameters"), what))) == 1:
        return
    for other, theirs in enumerate(gather_objects(backend, mine, (_AGREED, "differing parameters"), what)):
        for name in sorted({*mine, *theirs}) if isinstance(theirs, dict) else ():
            here, there = mine.get(name, "no such tensor"), theirs.get(name, "no such tensor")
            if here != there:
                raise ValueError(
                    f"{what}: {name!r} is {here.strip()} on rank {rank} and {there.strip()} on rank {other}. All ranks "
                    f"must make the same model"
                )
    raise ValueError(f"{what}: other ranks have other parameters. All ranks must make the same model")


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int = 0) -> None:
    """Give all ranks the state and the settings (learning rates ...) of the root's optimizer.

    The ranks need not have any state yet, and neither need the root. What is not a tensor must be numbers, text, bytes,
    None, or lists, tuples and maps of them.

    Raises:
        ValueError, on all ranks: the root's has something else. On some: their optimizer has other parameters.
        DistBackendError: a rank is lost or late.
    """
    backend = current()
    is_root = backend.group.rank == root_rank
    parameter_bytes = sum(parameter.nbytes for group in optimizer.param_groups for parameter in group["params"])
    tree = broadcast_tree(
        backend,
        optimizer.state_dict,
        root_rank,
        of="the optimizer's state",
        call="broadcast_optimizer_state",
        limit_bytes=limit_of(parameter_bytes),
    )
    if not is_root:
        optimizer.load_state_dict(tree)


def limit_of(own_bytes: int) -> int:
    """Return how many bytes of state a rank takes from another one, whose own parameters have so many."""
    return max(_STATE_AT_LEAST_BYTES, _STATE_PER_PARAMETERS * own_bytes)


def broadcast_tree(
    backend: DdsBackend, make: Callable[[], Any], root_rank: int, *, of: str, call: str, limit_bytes: int
) -> Any:
    """Give all ranks a tree of plain data and tensors of the root, which ``make`` makes there. Never pickle.

    Args:
        of: what the tree is, for errors: ``the optimizer's state``. call: the function, for errors and names.
        limit_bytes: most bytes of tensors that this rank takes.

    Returns:
        On the root what ``make`` has returned. On the others new memory, tensors on the CPU.

    Raises:
        ValueError, on all ranks: the root's has something that cannot be sent.
        CollectiveError: what came is no such tree, or too much.
        DistBackendError: a rank is lost or late.
    """
    tensors: list[tuple[str, Tensor]] = []
    made: Any = None

    def plan() -> list[Any]:
        nonlocal made
        made = make()
        planned = _planned(made, tensors, of)
        tensors[:] = [(path, tensor.cpu()) for path, tensor in tensors]
        return planned

    is_root = backend.group.rank == root_rank
    match share_object(backend, plan, (_AGREED, of), root_rank, call):
        case [packed, list(announced)]:
            if not is_root:
                tensors = _room_for(announced, of, limit_bytes)
        case _:
            raise CollectiveError(f"{call}: rank {root_rank} sent something else")
    numbered = [(f"{number} {path}", tensor) for number, (path, tensor) in enumerate(tensors)]
    _broadcast_all(backend, numbered, _STATE, root_rank)
    return made if is_root else _unpacked(packed, [tensor for _, tensor in tensors], of)


def check_tree(tree: Any, of: str) -> None:
    """Raise ValueError if :func:`broadcast_tree` would refuse a tree; the text names the place. Copies no tensor."""
    try:
        pack(_planned(tree, [], of))
    except ValueError as error:
        raise ValueError(f"{of} cannot be sent to other ranks: {error}") from None


def _planned(tree: Any, tensors: list[tuple[str, Tensor]], of: str) -> list[Any]:
    """Return what is sent before the tensors, which are appended."""
    packed = _packed(tree, "", tensors, of)
    return [packed, [[path, describe(tensor)] for path, tensor in tensors]]


def _room_for(announced: list[Any], of: str, limit_bytes: int) -> list[tuple[str, Tensor]]:
    """Memory for tensors: their paths and descriptions. Raises CollectiveError: too much, or not such a list."""
    tensors = []
    for one in announced:
        match one:
            case [str(path), str(description)]:
                tensor = empty_like_described(description, limit_bytes)
                limit_bytes -= tensor.nbytes
                tensors.append((path, tensor))
            case _:
                raise CollectiveError(f"what came is no list of the tensors of {of}")
    return tensors


# A tree of plain data and tensors, as plain data: [kind, content]. Kinds: t is a tensor by its number.


def _packed(value: Any, path: str, tensors: list[tuple[str, Tensor]], of: str, depth: int = 0) -> list[Any]:
    """The tree without its tensors, which are appended. Raises ValueError: it has something else."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"{of} is nested more than {_MAX_DEPTH} deep at {path}")
    if isinstance(value, Tensor):
        check_sendable(value)
        tensors.append((path, value.detach()))
        return ["t", len(tensors) - 1]
    if isinstance(value, Mapping):
        pairs = [(key, one, f"{path}.{key}".strip(".")) for key, one in value.items()]
        for key in value:  # a tuple would arrive as a list, which cannot be a key
            if not _is_plain(key):
                raise ValueError(f"{of} has a map at {path}, with a {type(key).__name__} as a key: {_SENDABLE_KEYS}")
        return ["m", [[key, _packed(one, its_path, tensors, of, depth + 1)] for key, one, its_path in pairs]]
    if isinstance(value, list | tuple):
        kind = "l" if isinstance(value, list) else "u"
        return [kind, [_packed(one, f"{path}.{i}".strip("."), tensors, of, depth + 1) for i, one in enumerate(value)]]
    if _is_plain(value):
        return ["v", value]
    raise ValueError(
        f"{of} has a {type(value).__name__} at {path}. Tensors, numbers of 64 bits, text, bytes, None, and "
        f"lists, tuples and maps of them can be sent"
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, int):
        return -(1 << 63) <= value < 1 << 64  # as msgpack has it
    return value is None or isinstance(value, float | str | bytes)


def _unpacked(packed: Any, tensors: list[Tensor], of: str, depth: int = 0) -> Any:
    """The tree again. Raises CollectiveError: it is none."""
    try:
        kind, content = packed
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        match kind:
            case "t":
                return tensors[content]
            case "m":
                return {key: _unpacked(one, tensors, of, depth + 1) for key, one in content}
            case "l" | "u":
                values = [_unpacked(one, tensors, of, depth + 1) for one in content]
                return values if kind == "l" else tuple(values)
            case "v":
                return content
        raise ValueError(f"kind {kind!r}")
    except (TypeError, ValueError, IndexError) as error:
        raise CollectiveError(f"what came is not {of}: {error}") from None
