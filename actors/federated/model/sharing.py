"""Which tensors of a model are exchanged, which are sent once, and which stay at their client: decided by name. And
where the values of each are then: in the vector of the model, and by the names of its state."""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from gradbus.actors.aggregation.merged_buffers import MERGEABLE, BufferLayout, MergedBuffer
from gradbus.actors.aggregation.strategies import Strategy
from gradbus.runtime.complex_pairs import count_floats, is_inexact, restored, shape_in_floats
from gradbus.runtime.config.federated import FederatedConfig, ShareSettings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.saved_state import Row
from gradbus.runtime.torch_compat import uncompiled_names
from gradbus.runtime.wire.control import Welcome

Exchange = Literal["trained", "all"]
KEEP = "keep"  # the rule for buffers that stay at their clients
REST = "**"  # the pattern of what no pattern of the user matches: a * of theirs is told from it
EVERYTHING = ("*",)
_NAMED = 5  # tensors that a message names


@dataclass(frozen=True, slots=True)
class Sharing:
    """Names the tensors that a run exchanges.

    Attributes:
        exchange: as ``federated.exchange``: the trained part, or all of it.
        include, exclude: as ``federated.share``: patterns of tensor names.
        buffers: pattern and rule of buffers of integers and booleans, of which the first that matches counts. What
            matches none is not exchanged, and begins each training as it was built.
    """

    exchange: Exchange = "trained"
    include: tuple[str, ...] = EVERYTHING
    exclude: tuple[str, ...] = ()
    buffers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, config: FederatedConfig, strategy: type[Strategy] = Strategy) -> Sharing:
        """Read it from a controller's settings. ``strategy``: of the run, whose rule is that of most buffers."""
        rules: dict[str, str] = {**config.buffers}
        rules.setdefault(REST, _default_rule(config, strategy))  # a site has the one of the level above
        return cls(config.exchange, tuple(config.share.include), tuple(config.share.exclude), tuple(rules.items()))

    @classmethod
    def of_welcome(cls, welcome: Welcome) -> Sharing:
        """Read it from the Welcome to a run."""
        exchange: Exchange = "trained" if welcome.frozen else "all"
        rules = tuple(welcome.buffers.items())
        return cls(exchange, tuple(welcome.include) or EVERYTHING, tuple(welcome.exclude), rules)

    def rule_of(self, spec: TensorSpec) -> str:
        """Return how a buffer of integers or booleans is merged; empty: it is not exchanged."""
        if spec.dtype not in MERGEABLE:
            return ""
        return next((rule for pattern, rule in self.buffers if fnmatchcase(spec.name, pattern)), "")

    def pattern_of(self, spec: TensorSpec) -> str:
        """Return the pattern of that rule; empty: none matches."""
        return next((pattern for pattern, _ in self.buffers if fnmatchcase(spec.name, pattern)), "")

    @property
    def has_patterns(self) -> bool:
        """Whether it names tensors, so that some may stay at the clients."""
        return self.include != EVERYTHING or bool(self.exclude)

    @property
    def keeps_some(self) -> bool:
        """Whether clients keep what they do not share, from round to round."""
        return self.has_patterns or any(rule == KEEP for _, rule in self.buffers)

    @property
    def patterns(self) -> tuple[str, ...]:
        """All of them; none without a choice by name."""
        return (*self.include, *self.exclude) if self.has_patterns else ()

    def settings(self) -> ShareSettings:
        """The patterns as the setting that they come from."""
        return ShareSettings(include=self.include, exclude=self.exclude)


class TensorSpec(NamedTuple):
    """One tensor of a model's state.

    Attributes:
        kind: a parameter that requires a gradient, one that does not, or a buffer.
        first: the first name of the same tensor: another one where weights are tied.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    kind: Literal["trained", "frozen", "buffer"]
    first: str

    @property
    def row(self) -> Row:
        """Return name, dtype and shape, as a checkpoint has them."""
        return self.name, str(self.dtype).removeprefix("torch."), list(self.shape)

    @property
    def is_inexact(self) -> bool:
        """Return whether it can be averaged: it holds floats, or complex numbers, which are pairs of them."""
        return is_inexact(self.dtype)

    @property
    def shape_in_floats(self) -> tuple[int, ...]:
        """Return the shape of its floats: of a complex tensor with 2 at the end."""
        return shape_in_floats(self.dtype, self.shape)


class Division(NamedTuple):
    """Names of tensors by what becomes of them. Frozen parameters that are in none of these stay as they were built.

    Attributes:
        shared: exchanged in every round. constant: sent once, and equal on all nodes.
        personal: trained at a client, kept there and never sent.
        merged: buffers of integers and booleans, of which changes are exchanged, and merged by a rule.
    """

    shared: frozenset[str]
    constant: frozenset[str]
    personal: frozenset[str]
    merged: frozenset[str]


class Shape(NamedTuple):
    """A division in numbers: ``dim`` shared values and ``frozen_dim`` constant ones.

    ``layout`` is a 64-bit hash over names, shapes and dtypes of both: equal on nodes whose vectors mean the same. What
    is personal is not in it, so it may differ from client to client, as heads of different sizes do.
    """

    dim: int
    layout: int
    frozen_dim: int


def specs_of(module: nn.Module) -> list[TensorSpec]:
    """The tensors of a module's state, in its order. Raises ConfigError: one has no shape yet, as in a lazy module."""
    state = {name: one for name, one in module.state_dict(keep_vars=True).items() if isinstance(one, Tensor)}
    if lazy := [name for name, tensor in state.items() if is_lazy(tensor)]:
        raise ConfigError(
            f"the model's {_some(lazy)} {'has' if len(lazy) == 1 else 'have'} no shape before the first batch: run one "
            f"batch through the model in build_model, before it is returned"
        )
    first = {id(tensor): name for name, tensor in reversed(list(state.items()))}
    return [
        TensorSpec(name, tensor.dtype, tuple(tensor.shape), _kind_of(tensor), first[id(tensor)])
        for name, tensor in state.items()
    ]


def _kind_of(tensor: Tensor) -> Literal["trained", "frozen", "buffer"]:
    if not isinstance(tensor, nn.Parameter):
        return "buffer"
    return "trained" if tensor.requires_grad else "frozen"


def divide(specs: Sequence[TensorSpec], sharing: Sharing) -> Division:
    """Decide what becomes of each tensor.

    Exchanged are parameters that require a gradient, and buffers of floats, such as running means, complex numbers
    among them; with ``exchange="all"``, or where no parameter requires a gradient, frozen ones as well. Of these,
    ``include`` and ``exclude`` choose. What they leave out is personal. Of buffers of integers and booleans they
    choose, too: those are merged, except where the rule is to keep them. A frozen parameter is sent once, unless
    ``exclude`` names it.

    Raises:
        ConfigError: names of one tensor, as of tied weights, are on both sides.
    """
    everything = sharing.exchange == "all" or not any(spec.kind == "trained" for spec in specs)
    names: Mapping[str, set[str]] = {
        "shared": set(),
        "constant": set(),
        "personal": set(),
        "merged": set(),
        "built": set(),
    }
    side_of: dict[str, str] = {}
    for spec in specs:
        side = _side_of(spec, sharing, everything)
        before = side_of.setdefault(spec.first, side)
        if before != side:
            raise ConfigError(
                f"federated.share: {spec.first!r} and {spec.name!r} are names of one tensor, and the patterns share "
                f"one of them alone. Let them match both names, or neither"
            )
        names[side].add(spec.name)
    return Division(*(frozenset(names[side]) for side in Division._fields))


def _side_of(spec: TensorSpec, sharing: Sharing, everything: bool) -> str:
    is_parameter, is_frozen = spec.kind != "buffer", spec.kind == "frozen"
    if not spec.is_inexact:
        if is_parameter:
            return "built"
        is_shared = _matches(spec.name, sharing.include) and not _matches(spec.name, sharing.exclude)
        return "merged" if is_shared and sharing.rule_of(spec) not in ("", KEEP) else "personal"
    if _matches(spec.name, sharing.exclude):
        return "built" if is_frozen and not everything else "personal"
    if is_frozen and not everything:
        return "constant"
    return "shared" if _matches(spec.name, sharing.include) else "personal"


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def shape_of(specs: Sequence[TensorSpec], division: Division, *, as_named: bool = False) -> Shape:
    """Sizes and layout of a division. Tied weights count once, by their first name.

    The layout is the same whether the model, or a part of it, is compiled; ``as_named``: as gradbus 0.1 had it, with
    the prefixes that ``torch.compile`` adds to names.
    """
    plain = {spec.name: spec.name for spec in specs} if as_named else uncompiled_names(spec.name for spec in specs)
    lines: tuple[list[str], list[str]] = ([], [])
    sizes = [0, 0]
    for spec in specs:
        for part, names in enumerate((division.shared, division.constant)):
            if spec.name in names and spec.first == spec.name:
                lines[part].append(f"{plain[spec.name]}:{spec.dtype}:{spec.shape}")
                sizes[part] += count_floats(spec.dtype, spec.shape)
    text = "\n".join([*lines[0], *(f"frozen {line}" for line in lines[1])])
    return Shape(sizes[0], int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little"), sizes[1])


def layout_of(specs: Sequence[TensorSpec], sharing: Sharing) -> BufferLayout:
    """Return the merged buffers, each by its first name, with their rules."""
    merged = divide(specs, sharing).merged
    return BufferLayout(
        MergedBuffer(spec.name, spec.dtype, spec.shape, sharing.rule_of(spec))
        for spec in specs
        if spec.name in merged and spec.name == spec.first
    )


def left_out(specs: Sequence[TensorSpec], sharing: Sharing) -> list[TensorSpec]:
    """Return what is not exchanged, though no pattern of the user leaves it to the clients: integer parameters, buffers
    of dtypes that cannot be merged, and those that are kept for the sake of privacy."""
    sides = divide(specs, sharing)
    exchanged = sides.shared | sides.constant | sides.merged
    return [
        spec
        for spec in specs
        if not spec.is_inexact
        and spec.name == spec.first
        and spec.name not in exchanged
        and _matches(spec.name, sharing.include)
        and not _matches(spec.name, sharing.exclude)
        and not (spec.kind == "buffer" and sharing.pattern_of(spec) not in ("", REST))
    ]


def _default_rule(config: FederatedConfig, strategy: type[Strategy]) -> str:
    """Return how a buffer is merged that no pattern of ``federated.buffers`` matches.

    With privacy or secure aggregation it is kept: its exact values would say of a single client what noise and masks
    hide. A robust strategy is for runs with hostile clients, of which one alone could set a flag, or a count to its
    largest value: there the value is that of the majority.
    """
    if config.privacy.name != "none" or config.secure_aggregation.enabled:
        return KEEP
    return strategy.buffer_rule


def check_buffers(specs: Sequence[TensorSpec], config: FederatedConfig, sharing: Sharing) -> None:
    """Look whether the rules for buffers fit the model and the other settings.

    Raises:
        ConfigError: one matches no buffer, or is for another dtype, or would send what privacy protects.
    """
    what = "federated.buffers"
    buffers = [spec for spec in specs if spec.kind == "buffer" and spec.dtype in MERGEABLE]
    for pattern, rule in config.buffers.items():
        if pattern == REST:
            continue  # of the level above, at a site
        _check_patterns(what, [pattern], specs)
        if not any(fnmatchcase(spec.name, pattern) for spec in buffers):
            raise ConfigError(
                f"{what}: {pattern!r} matches no buffer of integers or booleans; there are "
                f"{_some([spec.name for spec in buffers]) or 'none'}. Tensors of floats are averaged, or left to the "
                f"clients by federated.share"
            )
        if rule != KEEP and config.privacy.name != "none":
            raise ConfigError(
                f"{what}: {pattern!r} is {rule!r}, and with federated.privacy exact values, without noise, would leave "
                f"the clients. Set it to 'keep', or leave it out"
            )
    for spec in buffers:
        found, is_flag = sharing.rule_of(spec), spec.dtype == torch.bool
        if found in (("sum",) if is_flag else ("any", "all")):
            fitting = "any, all or median" if is_flag else "max, min, sum or median"
            raise ConfigError(
                f"{what}: {spec.name!r} is a buffer of {str(spec.dtype).removeprefix('torch.')}, for which there is no "
                f"{found!r}: set {fitting}, or keep"
            )
        if found == "median" and config.clients.kind == "sites":
            raise ConfigError(
                f"{what}: {spec.name!r} is 'median', and with federated.clients.kind=sites this controller sees what "
                f"sites have merged, of which no median follows. Set max, min or sum"
            )


def check_sharing(specs: Sequence[TensorSpec], sharing: Sharing) -> None:
    """Look whether the patterns fit the model.

    Raises:
        ConfigError: one matches no tensor, or nothing is left to share; with the names that come nearest.
    """
    _check_patterns("federated.share", sharing.patterns, specs)
    if sharing.has_patterns and not divide(specs, sharing).shared:
        left = [spec.name for spec in specs if spec.is_inexact and spec.kind != "frozen"]
        raise ConfigError(
            f"federated.share: include {list(sharing.include)} and exclude {list(sharing.exclude)} leave nothing to "
            f"share. What could be: {_some(left) or 'nothing, as all parameters are frozen'}"
        )


def _check_patterns(setting: str, patterns: Iterable[str], specs: Sequence[TensorSpec]) -> None:
    """Raises ConfigError: one matches no tensor."""
    names = [spec.name for spec in specs]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"{setting}: {pattern!r} matches no tensor of the model; {_nearest(pattern, names)}. It is compared "
                f"with whole names, where * stands for any characters"
            )


def check_kept(specs: Sequence[TensorSpec], sharing: Sharing | None, kept: Sequence[str]) -> None:
    """Look whether a run leaves at a client what it keeps there.

    Args:
        sharing: of the run; None: it is not known yet. kept: as ``client.keep_personal``.

    Raises:
        ConfigError: it does not, or a pattern matches no tensor.
    """
    _check_patterns("client.keep_personal", kept, specs)
    if sharing is None:
        return
    sides = divide(specs, sharing)
    shared = sides.shared | sides.merged
    if taken := [spec.name for spec in specs if spec.name in shared and _matches(spec.name, kept)]:
        raise ConfigError(
            f"the controller shares {_some(taken)}, which client.keep_personal keeps here: nothing is sent. On the "
            f"controller set federated.share.exclude to {json.dumps(list(kept))}, or to more than that"
        )


def check_buffers_sent(
    specs: Sequence[TensorSpec], welcome: Welcome, *, is_private: bool, insists_on_masks: bool
) -> None:
    """Look whether a client can send the buffers that a controller merges.

    Args:
        is_private: the run has differential privacy. insists_on_masks: the client sends nothing in the clear.

    Raises:
        ConfigError: they are not those of its model, or their exact values would say what noise or masks hide.
    """
    layout = layout_of(specs, Sharing.of_welcome(welcome))
    if layout and (is_private or insists_on_masks):
        why = "its updates have noise" if is_private else "client.least_members asks for masks"
        raise ConfigError(
            f"the controller asks for the exact values of {_some(layout.names)}, and {why}: nothing is sent. Leave "
            f"them out of federated.buffers on the controller, or set keep there"
        )
    if layout.digest != welcome.buffer_layout:
        raise ConfigError(
            f"the controller merges other buffers of integers and booleans than this client's model has, in names, "
            f"dtypes or shapes: here they are {_some(layout.names) or 'none'}. Use one model, or let the clients keep "
            f'those that differ: federated.buffers, {{"name": "keep"}}, on the controller'
        )


def check_noise(specs: Sequence[TensorSpec], sharing: Sharing) -> None:
    """Raises ConfigError: noise would be added to what is no parameter, such as a variance: it becomes negative."""
    shared = divide(specs, sharing).shared
    if sent := [spec.name for spec in specs if spec.name in shared and spec.kind == "buffer"]:
        raise ConfigError(
            f"federated.privacy: the model exchanges the buffers {', '.join(sent[:_NAMED])}, statistics of the data "
            f"that noise would make useless. Let them stay at the clients (federated.share.exclude), or use a "
            f"model without, such as with GroupNorm in place of BatchNorm"
        )


def _nearest(pattern: str, names: Sequence[str]) -> str:
    """Names like the pattern, or that have a part of it."""
    bare = pattern.replace("*", "").strip(".")
    near = difflib.get_close_matches(bare, names, n=_NAMED, cutoff=0.4)
    parts = {part: name for name in reversed(names) for part in name.split(".")}
    near += [parts[part] for part in difflib.get_close_matches(bare, list(parts), n=_NAMED, cutoff=0.5)]
    found = list(dict.fromkeys(near))[:_NAMED]
    return f"near are {', '.join(map(repr, found))}" if found else f"there are {_some(names)}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:_NAMED])) + (" ..." if len(names) > _NAMED else "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VectorLayout:
    """Places the exchanged tensors of a model in a vector, and behind them the frozen ones.

    Attributes:
        sharing: what decides which tensors these are.
        dim, frozen_dim: numbers of values of both. places: of every name in the vector; tied weights share one.
        layout: 64-bit hash over names, shapes and dtypes: equal on nodes whose vectors mean the same. layouts: that,
            and the one that gradbus 0.1 has written into a checkpoint of a compiled model.
        table, frozen_table: name, dtype and shape of each tensor, in the order of the vector.
        frozen_names: of the frozen ones, tied weights under each of their names.
        personal: the tensors that stay at a client, in the module's order.
        integers: the parameters of integers, which stay as they were built.
        buffers: the buffers of integers and booleans that are merged.
        names: which names of the module's state are tied, or have no saved values, for ``StateNames`` of a checkpoint.
    """

    sharing: Sharing
    dim: int
    frozen_dim: int
    places: dict[str, slice]
    layout: int
    layouts: frozenset[int]
    table: list[Row]
    frozen_table: list[Row]
    frozen_names: list[str]
    personal: list[TensorSpec]
    integers: list[TensorSpec]
    buffers: BufferLayout
    names: dict[str, Any]

    @classmethod
    def of(cls, specs: Sequence[TensorSpec], state_names: Iterable[str], sharing: Sharing) -> VectorLayout:
        """Lay out a model of these tensors. Raises ConfigError: as :func:`divide`.

        Args:
            state_names: all names of the module's state, also of values that are no tensors.
        """
        division = divide(specs, sharing)
        shape = shape_of(specs, division)
        places: dict[str, slice] = {}
        tables: tuple[list[Row], list[Row]] = ([], [])
        seen: dict[str, slice] = {}  # by first name
        size = 0
        for names, table in zip((division.shared, division.constant), tables, strict=True):
            for spec in specs:
                if spec.name not in names:
                    continue
                if spec.first not in seen:
                    seen[spec.first] = slice(size, size + count_floats(spec.dtype, spec.shape))
                    size = seen[spec.first].stop
                    table.append(spec.row)
                places[spec.name] = seen[spec.first]
        firsts = [spec for spec in specs if spec.name == spec.first]
        personal = [spec for spec in firsts if spec.name in division.personal]
        integers = [spec for spec in firsts if spec.kind != "buffer" and spec.dtype in MERGEABLE]
        buffers = layout_of(specs, sharing)
        saved = {*places, *buffers.names, *(spec.name for spec in (*personal, *integers))}
        tied = {spec.name: spec.first for spec in specs if spec.first != spec.name}
        return cls(
            sharing=sharing,
            dim=shape.dim,
            frozen_dim=shape.frozen_dim,
            places=places,
            layout=shape.layout,
            layouts=frozenset({shape.layout, shape_of(specs, division, as_named=True).layout}),
            table=tables[0],
            frozen_table=tables[1],
            frozen_names=[spec.name for spec in specs if spec.name in division.constant],
            personal=personal,
            integers=integers,
            buffers=buffers,
            names={"tied": tied, "unsaved": [name for name in state_names if name not in saved and name not in tied]},
        )


@dataclass(frozen=True, slots=True, eq=False)
class StateLayout:
    """Says of each name of a module's state where its value is: also of a model that has arrived while the module is
    being trained. It does not change, so that any thread may read it.

    Attributes:
        layout: of the vector.
        specs: the tensors, by name. names: all of the state, in its order.
        built: copies of the personal tensors and the merged buffers, as they were built.
        held: what is in neither, and no training changes: parameters of integers, frozen ones that are not exchanged,
            and values that are no tensors.
    """

    layout: VectorLayout
    specs: Mapping[str, TensorSpec]
    names: tuple[str, ...]
    built: Mapping[str, Tensor]
    held: Mapping[str, object]

    def state(self, vector: Tensor, frozen: Tensor, buffers: bytes, kept: Mapping[str, Tensor]) -> dict[str, Any]:
        """Return the state of a model, as tensors of their own on the CPU, by name.

        Args:
            vector: float32, shape (D,): the exchanged part. frozen: float32: what follows that.
            buffers: the block of the merged buffers that are not as they were built.
            kept: personal tensors of this client by name, complex ones as pairs of floats; the others are as built.
        """
        personal = {spec.name for spec in self.layout.personal}
        own = {name: one for name, one in kept.items() if name in personal}
        named = {**self.built, **own, **self.layout.buffers.unpack(buffers)}
        return {name: self._value(name, vector, frozen, named) for name in self.names}

    def _value(self, name: str, vector: Tensor, frozen: Tensor, named: Mapping[str, Tensor]) -> Any:
        if name in self.held:
            value = self.held[name]
            return _copied(value.detach().cpu()) if isinstance(value, Tensor) else value
        spec, place, dim = self.specs[name], self.layout.places.get(name), self.layout.dim
        if place is None:
            values = named[spec.first]
        else:
            values = vector[place] if place.stop <= dim else frozen[place.start - dim : place.stop - dim]
        values = values.reshape(spec.shape_in_floats)
        return _copied(restored(values, spec.dtype) if spec.dtype.is_complex else values).to(spec.dtype)


def _copied(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)
