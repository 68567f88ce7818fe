"""The options of a class that is not ours, from the signature of its constructor."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, Field, create_model

_PLAIN = (bool, int, float, str, type(None))
_SEQUENCES = (list, Iterable, Sequence)
_KNOWN_TO_LIBRARIES = {"Callable": Callable, "Iterable": Iterable, "Sequence": Sequence, "Literal": Literal}


class NeedsCode(TypeError):
    """The constructor needs a function or an object, which no configuration can give."""


def options_model(
    kind: type, base: type[BaseModel], *, skipped: Collection[str], optional: Collection[str]
) -> type[BaseModel]:
    """A model with the fields of ``base``, and one for each parameter of the constructor, of its type and default.

    A field of ``base`` with the name of a parameter has the default of that, unless its own is None.

    Args:
        kind: the class. Its constructor's first parameter is no option.
        skipped: further parameters that are none. What takes functions or objects is left out where it has a default.
        optional: parameters that may be missing, whatever the signature says: None then.

    Raises:
        NeedsCode: a parameter without a default takes functions or objects.
    """
    hints = _hints(kind)
    parameters = list(inspect.signature(kind).parameters.values())[1:]
    fields: dict[str, Any] = {}
    for parameter in parameters:
        name = parameter.name
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or name in skipped:
            continue
        has_default = parameter.default is not parameter.empty
        plain = _plain(hints.get(name, type(parameter.default) if has_default else Any))
        if plain is None and not has_default:
            raise NeedsCode(f"{kind.__name__} needs {name}, a {hints[name]}")
        if plain is None:
            continue
        default = parameter.default if has_default else ...
        if name in base.model_fields:  # with our text and limits
            known = base.model_fields[name]
            default = known.default if known.default is None else default
            limits = known.metadata or [None]  # Annotated takes at least one
            field = Field(default, description=known.description)
            fields[name] = (Annotated[(known.annotation, *limits)], field)
        elif name in optional:
            fields[name] = (plain | None, None)
        else:
            fields[name] = (plain, default)
    model: type[BaseModel] = create_model(kind.__name__, __base__=base, **fields)
    return model


def _hints(kind: Any) -> Mapping[str, Any]:
    try:
        return typing.get_type_hints(kind.__init__, localns=_KNOWN_TO_LIBRARIES)
    except (NameError, TypeError):  # names that only a type checker knows
        return {}


def _plain(hint: Any) -> Any:
    """The part of a type that JSON can give; None where there is none."""
    if hint is Any or hint in _PLAIN:
        return hint
    origin, members = get_origin(hint), get_args(hint)
    if origin is Literal:
        return hint
    if origin in (Union, types.UnionType):
        plain = [kept for member in members if (kept := _plain(member)) is not None]
        return Union[tuple(plain)] if any(one is not type(None) for one in plain) else None  # noqa: UP007 - at run time
    if origin is tuple:
        plain = [member if member is ... else _plain(member) for member in members]
        return None if None in plain else tuple[tuple(plain)]  # type: ignore[misc]
    if origin in _SEQUENCES:
        inner = _plain(members[0])
        return None if inner is None else list[inner]  # type: ignore[valid-type]
    return None
