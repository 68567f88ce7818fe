"""What all settings have in common: groups of fields, checked once, and where their values come from.

Files, environment and command line are merged, weak to strong. Errors name the wrong key and the nearest right one.
"""

from __future__ import annotations

import copy
import os
import reprlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradbus.runtime.choices import Choice, Choices
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import parse_json, read_text
from gradbus.runtime.misuse import WrongArgument, WrongKeyword, described
from gradbus.runtime.nearest import nearest

MAX_FILE_BYTES = 256 << 10  # of a configuration
MAX_FILE_MEMORY = 32 << 20  # that reading one may take: tables within tables take most

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Duration = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]  # seconds; the wire takes no more
Fraction = Annotated[float, Field(gt=0, le=1)]


class _PerRank:
    """Marks a field, or a whole group, that may differ between the ranks of a data-parallel run."""


PER_RANK = _PerRank()

if TYPE_CHECKING:  # pydantic has no public name for it
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Explained(ModelMetaclass):
    """Checks settings that a program gives by keyword, with the same error texts as those of a file."""

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - of a metaclass
        if args:
            example = next(iter(cls.model_fields), "name")
            raise WrongKeyword(f"{cls.__name__} takes keywords alone, as in {cls.__name__}({example}=...)")
        try:
            return super().__call__(**kwargs)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False)
            kind = WrongKeyword if any(fault["type"] == "extra_forbidden" for fault in faults) else ConfigError
            raise kind(f"{cls.__name__}: {_explain_all(cls, faults, kwargs)}") from None


class Settings(BaseModel, metaclass=_Explained):
    """Base of all settings: frozen; an unknown key is an error; the text below a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)

    renamed: ClassVar[Mapping[str, str]] = {}
    """Keys that people may know by another name, and where they are now, as ``group.key``."""

    @classmethod
    def expect(cls, given: Any) -> Self:
        """Return settings that a program gave as ``config``; for None the defaults.

        Raises:
            WrongArgument, which is a ConfigError and a TypeError: they are of another class, such as a dict.
        """
        if given is None:
            return cls()
        if not isinstance(given, cls):
            way = f"{cls.__name__}(**config)" if isinstance(given, Mapping) else f"{cls.__name__}(...)"
            raise WrongArgument(f"config: expected a {cls.__name__}, got {described(given)}: write config={way}")
        return given

    @classmethod
    def without_effect(cls, given: Mapping[str, Any]) -> Mapping[str, str]:
        """Return keys, as ``group.key``, that have no effect here, each with a sentence that says so and where the
        value belongs: no error about another key suggests them. ``given``: the values of this group, unchecked."""
        return {}

    def replaced(self, key: str, value: Any) -> Self:
        """A copy with another value of one key, such as ``checkpoint.dir``. The value is not checked."""
        name, _, rest = key.partition(".")
        return self.model_copy(update={name: getattr(self, name).replaced(rest, value) if rest else value})


def flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Each key of nested settings, such as ``optimizer.lr``, and its value."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


class CheckpointSettings(Settings):
    """Checkpoints of a run."""

    dir: Annotated[Path | None, PER_RANK] = None
    """Directory of the checkpoints. null: the commands of gradbus use one in the run directory; a program of your own
    makes none."""
    keep: Annotated[int, Field(ge=1)] = 3
    """Number of checkpoints to keep."""
    resume: bool = True
    """Whether to continue from the newest checkpoint that fits, if there is one."""


class HistorySettings(Settings):
    """The event journal, for `gradbus check`."""

    dir: Path | None = None
    """Directory of the event journal. null: no journal; `gradbus controller` and `gradbus worker` keep one in the run
    directory."""


_MAX_FAULTS = 20  # in one error text; the search for the nearest right key takes time
_MAX_TEXT = 200
_MAX_DEPTH = 32
_SHORT = reprlib.Repr()  # of values: no deeper, no longer than a person reads
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MAX_TEXT

S = TypeVar("S", bound=BaseModel)


def load_settings(
    kind: type[S],
    path: Path | None = None,
    *,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> S:
    """Settings from, weak to strong: ``values``, a JSON or TOML file, the environment, ``overrides``.

    Args:
        kind: the model to fill.
        path: a ``.json`` or ``.toml`` file.
        overrides: ``section.key=value``; the value is JSON, or text if it is not.
        environment: ``GRADBUS_SECTION__KEY=value``; by default the process's own.
        values: the defaults of the program.

    Raises:
        ConfigError: with every wrong key, what was expected, and the nearest right key.
    """
    merged: dict[str, Any] = copy.deepcopy(dict(values or {}))
    where = "settings"
    if path is not None:
        where = str(path)
        _merge(kind, merged, read_settings(path))
    environment = os.environ if environment is None else environment
    of_environment: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        if name.startswith("GRADBUS_") and "__" in name:
            _put(kind, of_environment, name.removeprefix("GRADBUS_").lower().split("__"), text)
    _merge(kind, merged, of_environment)
    of_command: dict[str, Any] = {}
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {_short(item)!r}: expected section.key=value, for example federated.rounds=20")
        _put(kind, of_command, key.strip().split("."), text)
    _merge(kind, merged, of_command)
    return check_settings(kind, merged, where=where)


def check_settings(kind: type[S], values: Mapping[str, Any], *, where: str) -> S:
    """Check the values and return them as settings. Raises ConfigError: some are wrong; its text names each."""
    if _is_deep(values):
        raise ConfigError(f"{where}: sections and lists are nested more than {_MAX_DEPTH} deep")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        raise ConfigError(f"{where}: {_explain_all(kind, faults, values)}") from None


def _explain_all(kind: type[BaseModel], faults: Sequence[Any], values: Mapping[str, Any]) -> str:
    lines = [_explain(kind, fault, values) for fault in faults[:_MAX_FAULTS]]
    lines += [f"and {len(faults) - _MAX_FAULTS} more"] * (len(faults) > _MAX_FAULTS)
    return "; ".join(lines)


def _explain(kind: type[BaseModel], fault: Any, values: Mapping[str, Any]) -> str:
    location = [_short(str(step)) for step in fault["loc"]]
    name = ".".join(location) or "settings"
    if fault["type"] == "extra_forbidden":
        return f"unknown key {name!r}{_hint(kind, location, values, is_section=isinstance(fault['input'], Mapping))}"
    if fault["type"] == "missing":
        return f"key {name!r} is missing"
    message: str = fault["msg"].removeprefix("Value error, ")
    if not location:
        return message
    if fault["type"] == "model_type" and (group := _group_at(kind, location)) is not None:
        message = f"expected an object with some of {', '.join(group.model_fields)}"
    if fault["type"] == "tuple_type":
        message = "expected a list, in brackets"
    over_a_section = isinstance(fault["input"], Mapping)
    found = "" if over_a_section else f", got {_shown(fault['input'])}"
    return f"{name}: {message[:1].lower()}{message[1:]}{found}"


def _hint(kind: type[BaseModel], location: list[str], values: Mapping[str, Any], *, is_section: bool) -> str:
    """Say which key was probably meant by the last step of the location, of those that have an effect beside
    ``values``, all that was given."""
    group = _group_at(kind, location[:-1])
    if group is None:
        return ""
    meant = _probably_meant(kind, group, location, is_section)
    useless = dict(_without_effect(kind, values))
    if useful := [key for key in meant if key not in useless]:
        place = ".".join(location[:-1])
        shown = [key.rpartition(".")[2] if key.rpartition(".")[0] == place else key for key in useful[:3]]
        return f", did you mean {' or '.join(map(repr, shown))}?"
    if meant:
        return f"; {meant[0]!r} {useless[meant[0]]}"
    return f"; known here: {', '.join(sorted(group.model_fields))}"


def _probably_meant(
    kind: type[BaseModel], group: type[BaseModel], location: list[str], is_section: bool
) -> Sequence[str]:
    """Find the keys that the last step of the location may stand for: one of that name in a group within its own, else
    in any other, else one with a near name in its own group, or within, else in any other.

    ``is_section``: whether the value of the wrong key is a section, which is meant for a key that takes one; another
    value is not meant for a group: ``roundz`` is as near to the group ``round`` as to ``rounds``.
    """
    *place, wrong = location
    deeper: dict[str, list[str]] = {}  # keys that are not right here, but one or more groups further down
    for path in sorted(_paths(group), key=lambda path: _field_type(group, path[0]) is Choice):
        if len(path) > 1 and path[-1] not in group.model_fields:
            deeper.setdefault(path[-1], []).append(".".join([*place, *path]))
    for old, new in getattr(group, "renamed", {}).items():
        deeper[old] = [".".join([*place, new])]
    everywhere: dict[str, list[str]] = {}
    for path in sorted(_paths(kind), key=len):
        everywhere.setdefault(path[-1], []).append(".".join(path))
    everywhere |= {old: [new] for old, new in getattr(kind, "renamed", {}).items()}
    if exact := deeper.get(wrong) or everywhere.get(wrong):
        return exact
    own = {key: [".".join([*place, key])] for key in group.model_fields}
    for keys, slips_alone in (({**own, **deeper}, False), (everywhere, True)):
        fits = _takes_section if is_section else _takes_value
        fitting = [key for key, paths in keys.items() if fits(kind, paths[0].split("."))]
        if near := nearest(wrong, fitting, slips_alone=slips_alone):
            return keys[near]
    return []


def _without_effect(kind: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every key that has no effect beside the values, and the sentence that says so."""
    if issubclass(kind, Settings):
        yield from ((f"{prefix}{key}", why) for key, why in kind.without_effect(values).items())
    for name in kind.model_fields:
        inner = _field_type(kind, name)
        if inner is not None and inner is not Choice:
            below = values.get(name)
            yield from _without_effect(inner, below if isinstance(below, Mapping) else {}, f"{prefix}{name}.")


def _paths(group: type[BaseModel]) -> Iterator[tuple[str, ...]]:
    """Every key of a group, of the groups in it, and of the options of its choices."""
    for name, field in group.model_fields.items():
        yield (name,)
        inner = _field_type(group, name)
        if inner is Choice:
            table = next(mark for mark in field.metadata if isinstance(mark, Choices))
            for key in dict.fromkeys(key for other in table.table for key in table.options_of(other).model_fields):
                yield name, key
        elif inner is not None:
            yield from ((name, *path) for path in _paths(inner))


def _is_deep(values: Mapping[str, Any]) -> bool:
    """Whether the values are nested deeper than JSON and error texts can show."""
    level: list[Any] = [values]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, Mapping) else value)
            if isinstance(inner, Mapping | list | tuple)
        ]
    return bool(level)


def _shown(value: Any) -> str:
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number of thousands of digits, which TOML can have as 0x...
        return f"a {type(value).__name__} that is too long to be shown"


def _short(text: str) -> str:
    """Cut a text to a readable length."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def _field_type(kind: type[BaseModel] | None, key: str) -> type[BaseModel] | None:
    """The model of a field that is a group or a choice; None: of any other."""
    field = None if kind is None else kind.model_fields.get(key)
    found = None if field is None else field.annotation
    return found if isinstance(found, type) and issubclass(found, BaseModel) else None


def _takes_value(kind: type[BaseModel], location: Sequence[str]) -> bool:
    """Whether there is a key at this place, counted from the whole settings, that is more than a group of others."""
    return _group_at(kind, location) in (None, Choice)


def _takes_section(kind: type[BaseModel], location: Sequence[str]) -> bool:
    """Whether the key at this place is a group, a choice with options, or holds a mapping."""
    *place, key = location
    group = _group_at(kind, place)
    field = None if group is None else group.model_fields.get(key)
    if field is None:  # an option of a choice
        return False
    kinds = (field.annotation, *get_args(field.annotation))
    return _field_type(group, key) is not None or any(get_origin(one) is dict for one in kinds)


def _group_at(kind: type[BaseModel], location: Iterable[str]) -> type[BaseModel] | None:
    found: type[BaseModel] | None = kind
    for step in location:
        found = _field_type(found, step)
    return found


def read_settings(path: Path) -> dict[str, Any]:
    """Read the sections of a JSON or TOML file, unchecked. Raises ConfigError: it cannot be read, or is neither."""
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"configuration {path} is not a UTF-8 text file") from None
    except ValueError as error:
        raise ConfigError(f"configuration {path} is no configuration: it has {error}") from None
    try:
        loaded = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
    except (ValueError, RecursionError) as error:  # both decoders' errors are ValueErrors
        raise ConfigError(
            f"configuration {path} is not valid {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}"
        ) from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"configuration {path}: expected an object with sections, got {type(loaded).__name__}")
    return loaded


def _merge(kind: type[BaseModel] | None, into: dict[str, Any], other: Mapping[str, Any]) -> None:
    """Put the values of a stronger source over those of weaker ones."""
    for key, value in other.items():
        inner, before = _field_type(kind, key), into.get(key)
        if inner is Choice:
            into[key] = _merge_choice(before, value)
        elif isinstance(value, Mapping) and isinstance(before, dict):
            _merge(inner, before, value)
        else:
            into[key] = value


def _merge_choice(before: Any, value: Any) -> Any:
    """Options alone belong to the choice that was there before; another choice begins without options."""
    before, value = ({"name": given} if isinstance(given, str) else given for given in (before, value))
    if not isinstance(before, Mapping) or not isinstance(value, Mapping):
        return value
    is_other = "name" in value and value["name"] != before.get("name", value["name"])
    return value if is_other else {**before, **value}


def _put(kind: type[BaseModel] | None, values: dict[str, Any], path: list[str], text: str) -> None:
    try:
        value = parse_json(text)
    except ValueError:
        value = text
    for step in path[:-1]:
        inner = values.setdefault(step, {})
        kind = _field_type(kind, step)
        if kind is Choice and isinstance(inner, str):
            inner = values[step] = {"name": inner}
        if not isinstance(inner, dict):
            raise ConfigError(f"{_short('.'.join(path))}: {_short(step)!r} is not a section")
        values = inner
    _merge(kind, values, {path[-1]: value})  # options may have been given before the choice that they are of
