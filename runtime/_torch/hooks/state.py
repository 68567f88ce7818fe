"""What all hooks share: which parameters there are, one all_gather per bucket, and saving by name."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from gradbus import codecs
from gradbus.runtime.errors import CollectiveError
from gradbus.torch.hooks import wire


@dataclass(frozen=True, slots=True, eq=False)
class HookParameter:
    """A parameter that is trained. ``layout`` is that of this one tensor alone.

    Its gradient comes flat, in the order that the elements have in memory: that of ``stride``, which is another one for
    ``channels_last``. What is remembered of it has this order, too; what is saved has the parameter's shape.
    """

    parameter: Tensor
    name: str
    layout: codecs.DgcLayout
    stride: tuple[int, ...]
    is_compressed: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.layout.slots[0].shape

    @property
    def numel(self) -> int:
        return self.layout.dim

    def shaped(self, flat: Tensor) -> Tensor:
        """A view of ``flat``, shape (n,), in the shape of the parameter."""
        return flat.as_strided(self.shape, self.stride)

    def flattened(self, tensor: Tensor) -> Tensor:
        """The inverse of :meth:`shaped`, for a tensor of any strides; a copy."""
        ordered = torch.empty_strided(self.shape, self.stride).copy_(tensor.detach())
        return ordered.as_strided((self.numel,), (1,))


@dataclass(frozen=True, slots=True, eq=False)
class BucketLayout:
    """The message of a bucket. ``starts``: of the sections, one for each member, and the end of the last."""

    members: tuple[HookParameter, ...]
    starts: tuple[int, ...]
    digest: int

    def sections(self, message: Tensor) -> list[Tensor]:
        return [message[start:stop] for start, stop in pairwise(self.starts)]


class HookState(ABC):
    """The state of a communication hook: of one rank, for one model.

    It knows parameters, not buckets: DDP sorts them into other buckets after the first step, and a state that was saved
    goes on with any sizes of buckets. Every rank sends one message per bucket, in one ``all_gather``, and adds up the
    messages of all in rank order; so all ranks get the same bits.

    A gradient with NaN or infinity on one rank becomes one that is not finite on all ranks, so that all leave the step
    out: a loss scaler sees it, as would ``clip_grad_norm_(..., error_if_nonfinite=True)``.

    Attributes:
        steps: backward passes so far that exchanged gradients.
        messages: sent by this rank; one per bucket. bytes_out: of all of them.
        dense_bytes: what the same gradients take in float32.
    """

    hook: ClassVar[str]  # its name, one of hooks_wire.HOOKS
    has_memory: ClassVar[bool] = False  # whether parts of gradients wait here, which belong to this rank alone

    def __init__(
        self, named_parameters: Iterable[tuple[str, Tensor]], *, process_group: dist.ProcessGroup | None, min_numel: int
    ) -> None:
        """
        Args:
            named_parameters: ``model.named_parameters()``. Those without ``requires_grad`` are passed over.
            process_group: that of DDP, where it is not the default one.
            min_numel: parameters of fewer elements, or of fewer than two dimensions, go dense, in float32.

        Raises:
            ValueError: a parameter that is not float32 on the CPU, a name or a parameter given twice, or a process
                group that this rank is not in.
        """
        if process_group is not None and not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(
                f"{type(self).__name__}: process_group must be a group that this rank is in, got {process_group!r}"
            )
        if not isinstance(min_numel, int) or min_numel < 0:
            raise ValueError(f"{type(self).__name__}: min_numel must be a whole number >= 0, got {min_numel!r}")
        self._process_group = process_group
        self._members: dict[int, HookParameter] = {}
        self._plans: dict[tuple[int, ...], BucketLayout] = {}
        self._options_digest = 0
        self.steps = 0
        self.messages = 0
        self.bytes_out = 0
        self.dense_bytes = 0
        named = [(name, parameter) for name, parameter in named_parameters if parameter.requires_grad]
        if not named:
            raise ValueError(f"{type(self).__name__}: no parameters that require a gradient were given")
        for name, parameter in named:
            self._take_in(name, parameter, min_numel)

    def _take_in(self, name: str, parameter: Tensor, min_numel: int) -> None:
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ValueError(
                f"{type(self).__name__}: parameter {name!r} must be float32 on the CPU, got {parameter.dtype} on "
                f"{parameter.device}; use torch's own hooks for this model"
            )
        if id(parameter) in self._members or any(member.name == name for member in self._members.values()):
            raise ValueError(f"{type(self).__name__}: parameter {name!r} is given twice; name a shared parameter once")
        layout = codecs.DgcLayout.of([(name, parameter)], min_numel=min_numel)
        dense = torch.empty_like(parameter, device="meta")  # strides as DDP gives them to the gradient
        stride = parameter.stride() if dense.stride() == parameter.stride() else dense.contiguous().stride()
        self._members[id(parameter)] = HookParameter(parameter, name, layout, stride, self._compresses(layout))

    # For each hook

    def _compresses(self, layout: codecs.DgcLayout) -> bool:
        return layout.sparse_elems > 0

    @abstractmethod
    def _options(self) -> dict[str, Any]:
        """What must be equal on all ranks, as plain values."""

    @abstractmethod
    def _section_bytes(self, member: HookParameter) -> int:
        """The size of the section of a compressed parameter; the same on all ranks."""

    @abstractmethod
    def _encode(self, member: HookParameter, gradient: Tensor, section: Tensor) -> None:
        """Say in ``section``, uint8 and zero, what this rank has for ``gradient``, float32, shape (n,)."""

    @abstractmethod
    def _decode(self, member: HookParameter, sections: Sequence[Tensor], gradient: Tensor) -> None:
        """Put the mean of all ranks in ``gradient``. ``sections``: in rank order."""

    def _decode_dense(self, member: HookParameter, parts: Sequence[Tensor], gradient: Tensor) -> None:
        """The same of one that is not compressed. ``parts``: float32, shape (n,), in rank order."""
        mean_in_rank_order(parts, gradient)

    # One bucket

    @property
    def group(self) -> dist.ProcessGroup:
        """The group that exchanges gradients."""
        group = self._process_group or dist.group.WORLD
        if group is None:
            raise RuntimeError(f"{type(self).__name__}: call torch.distributed.init_process_group first")
        return group

    @torch.no_grad()
    def exchange(self, bucket: GradBucket) -> Future[Tensor]:
        """Send this rank's message for the bucket. The future is the bucket's buffer with the mean of all ranks."""
        group = self.group
        buffer = bucket.buffer()
        if buffer.layout != torch.strided or buffer.dtype != torch.float32:
            raise ValueError(
                f"hooks.{self.hook}: bucket {bucket.index()} is {buffer.dtype}, {buffer.layout}; expected float32, "
                f"strided (no sparse=True of embeddings, no mixed_precision of DDP)"
            )
        if bucket.index() == 0:
            self.steps += 1
        plan = self._plan(bucket)
        gradients = [gradient.view(-1) for gradient in bucket.gradients()]
        rank, world, size = group.rank(), group.size(), plan.starts[-1]
        header = wire.BucketHeader(wire.HOOKS.index(self.hook), rank, self.steps, plan.digest, self._options_digest)
        message = torch.zeros(size, dtype=torch.uint8)
        wire.write_header(message, header)
        for member, gradient, section in zip(plan.members, gradients, plan.sections(message), strict=True):
            if member.is_compressed:
                self._encode(member, gradient, section)
            else:
                wire.floats(section, member.numel).copy_(gradient)
        self.messages += 1
        self.bytes_out += size
        self.dense_bytes += 4 * buffer.numel()
        everyone = torch.empty(world * size, dtype=torch.uint8)
        work = dist.all_gather_into_tensor(everyone, message, group=group, async_op=True)
        assert work is not None

        @torch.no_grad()
        def decode(future: Future[Any]) -> Tensor:
            future.value()  # raises what went wrong on the way
            self._decode_all(plan, header, everyone.view(world, size), gradients)
            return buffer

        mean: Future[Tensor] = work.get_future().then(decode)
        return mean

    def _decode_all(
        self, plan: BucketLayout, header: wire.BucketHeader, messages: Tensor, gradients: Sequence[Tensor]
    ) -> None:
        for rank, message in enumerate(messages):
            wire.check_header(message, header, rank)
        by_rank = [plan.sections(message) for message in messages]
        for member, gradient, *sections in zip(plan.members, gradients, *by_rank, strict=True):
            if member.is_compressed:
                try:
                    self._decode(member, sections, gradient)
                except (codecs.CodecError, CollectiveError) as error:
                    raise CollectiveError(f"hooks.{self.hook}, gradient of {member.name!r}: {error}") from None
            else:
                self._decode_dense(member, [wire.floats(section, member.numel) for section in sections], gradient)

    def _plan(self, bucket: GradBucket) -> BucketLayout:
        parameters = bucket.parameters()
        key = tuple(map(id, parameters))
        plan = self._plans.get(key)
        if plan is not None:
            return plan
        for parameter in parameters:
            if id(parameter) not in self._members:
                raise ValueError(
                    f"hooks.{self.hook}: bucket {bucket.index()} has a parameter of shape {tuple(parameter.shape)} "
                    f"that {type(self).__name__} does not know; give it named_parameters() of the model that DDP wraps"
                )
        members = tuple(self._members[id(parameter)] for parameter in parameters)
        sizes = [self._section_bytes(member) if member.is_compressed else 4 * member.numel for member in members]
        described = json.dumps([[member.layout.digest, member.stride, member.is_compressed] for member in members])
        self._options_digest = wire.digest(json.dumps(self._options(), sort_keys=True))
        plan = self._plans[key] = BucketLayout(members, wire.lay_out(sizes), wire.digest(described))
        return plan

    # Saving

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on, by the parameters' names: tensors, as they are and not copied; numbers, text.

        Save one for each rank. ``torch.load(..., weights_only=True)`` reads it.
        """
        return {
            "hook": self.hook,
            "rank": self.group.rank(),
            "world": self.group.size(),
            "steps": self.steps,
            "parameters": {member.name: self._saved(member) for member in self._members.values()},
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go on from ``saved``; its tensors are copied. Sizes of buckets may differ from those it was saved with.

        Raises:
            ValueError: saved by another hook, for other parameters, or by another rank or in a world of another size
                while parts of gradients wait in it; or damaged. Then nothing is changed.
        """
        if not isinstance(saved, Mapping) or saved.get("hook") != self.hook:
            found = saved.get("hook") if isinstance(saved, Mapping) else type(saved).__name__
            raise ValueError(f"{type(self).__name__}: the saved state is of hook {found!r}, expected {self.hook!r}")
        place, here = (saved.get("rank"), saved.get("world")), (self.group.rank(), self.group.size())
        if self.has_memory and place != here:
            raise ValueError(
                f"{type(self).__name__}: the state was saved by rank {place[0]} of {place[1]}, this is rank {here[0]} "
                f"of {here[1]}; what a rank has not sent yet is its own. Load what this one saved, or start anew"
            )
        steps = whole_number(saved, "steps")
        parameters = saved.get("parameters")
        names = {member.name for member in self._members.values()}
        if not isinstance(parameters, Mapping) or set(parameters) != names:
            found = set(parameters) if isinstance(parameters, Mapping) else set()
            raise ValueError(
                f"{type(self).__name__}: the saved state is for other parameters: it lacks {_some(names - found)}, and "
                f"has {_some(found - names)} that this model has not"
            )
        self._load({member: parameters[member.name] for member in self._members.values()}, saved)
        self.steps = steps

    def _saved(self, member: HookParameter) -> dict[str, Any]:
        """What is remembered of one parameter."""
        return {}

    def _load(self, parameters: Mapping[HookParameter, Mapping[str, Any]], saved: Mapping[str, Any]) -> None:
        """Check all, then change all. ``saved``: the whole state."""
        del parameters, saved  # nothing is remembered


def mean_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> None:
    """Into ``out``, float32, shape (n,). Summed in float32 in the order given, then multiplied by 1 / N once, so that
    all ranks get the same bits."""
    out.copy_(parts[0])
    for part in parts[1:]:
        out.add_(part.to(torch.float32))
    out.mul_(1.0 / len(parts))


def saved_tensor(saved: Mapping[str, Any], name: str, member: HookParameter) -> Tensor:
    """The tensor ``name`` of the parameter, checked: float32, of the parameter's shape. A flat copy.

    Raises:
        ValueError: it is not.
    """
    tensor = saved.get(name) if isinstance(saved, Mapping) else None
    if not isinstance(tensor, Tensor) or tuple(tensor.shape) != member.shape or tensor.dtype != torch.float32:
        got = f"{tensor.dtype} of {tuple(tensor.shape)}" if isinstance(tensor, Tensor) else repr(tensor)
        raise ValueError(
            f"saved state of {member.name!r}: {name} must be float32 of shape {member.shape}, got {got}; saved with "
            f"another model or min_numel?"
        )
    return member.flattened(tensor)


def whole_number(saved: Mapping[str, Any], name: str) -> int:
    """The number ``name``. Raises ValueError: it is not a whole number >= 0."""
    value = saved.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"saved state: {name} must be a whole number >= 0, got {value!r}")
    return value


def _some(names: set[str]) -> str:
    return (
        ", ".join(repr(name) for name in sorted(map(str, names))[:5]) + (" ..." if len(names) > 5 else "") or "nothing"
    )
