"""Choices by name: a class that a package has under this name, or one of the user's as ``package.module:Name``.

A built-in choice is a class with a ``choice`` of its own, in any module of the package: it is found by looking, so that
a new one is a new file, and nothing else is edited. Its options are the fields of its ``Options``, a pydantic model.
Settings, error texts, help and documents come from the same table. A package is imported when a setting first names
something in it, so a table says by a string where its classes are.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import traceback
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, core_schema

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.json_text import count_values, parse_json
from gradbus.runtime.nearest import nearest

T = TypeVar("T")

_MAX_NAME_CHARS = 256
MAX_OPTIONS_CHARS = 4096
"""Length of the options of a codec as JSON, which travel to the clients."""
_MAX_OPTION_VALUES = 256
_TABLES: list[Choices[Any]] = []
"""The tables of all settings. Only an error looks a name up in the others, as that imports their packages."""


class Options(BaseModel):
    """Options of a choice: keywords of its constructor. The text below a field is its description. Without fields,
    those of a choice that has none."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )


class Choice(BaseModel):
    """What a setting names, with the options that were given; those that were not have the defaults of the choice."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str

    @property
    def options(self) -> dict[str, Any]:
        """The options that were given, checked."""
        return dict(self.model_extra or {})


class Choices(Generic[T]):
    """Holds what one setting may name: the annotation of its field, which is a :class:`Choice`.

    A setting is given as a name, or as a mapping with ``name`` and options; without ``name`` they are options of the
    default choice.
    """

    def __init__(self, package: str, *, key: str, what: str, default: str, own: bool = True) -> None:
        """
        Args:
            package: whose modules have the built-in classes.
            key: of the setting, as in ``federated.strategy``.
            what: what a choice is, in a few words.
            default: the choice where the setting is not given.
            own: whether a class of the user's may be named.
        """
        self._package = package
        self._own = own
        self.key = key
        self.what = what
        self.default = Choice(name=default)
        _TABLES.append(self)

    @cached_property
    def table(self) -> Mapping[str, type[T]]:
        """The built-in classes by name, in the order of their names."""
        found: dict[str, Any] = {}
        for info in pkgutil.iter_modules(importlib.import_module(self._package).__path__):
            module = importlib.import_module(f"{self._package}.{info.name}")
            for kind in vars(module).values():
                if inspect.isclass(kind) and kind.__module__ == module.__name__ and vars(kind).get("choice"):
                    found[vars(kind)["choice"]] = kind
        return dict(sorted(found.items()))

    def help(self) -> dict[str, str]:
        """The first sentence of each built-in class's docstring, by name."""
        texts = {name: " ".join((inspect.getdoc(kind) or "").split()) for name, kind in self.table.items()}
        return {name: text.partition(". ")[0].rstrip(".") for name, text in texts.items()}

    def find(self, name: str) -> type[T]:
        """The class of this name, or of ``package.module:Name``, which is imported.

        Raises:
            ConfigError: there is none; it names the nearest one.
        """
        if ":" not in name or not self._own:
            if (kind := self.table.get(name)) is not None:
                return kind
            near = nearest(name, self.table)
            hint = self._elsewhere(name) or (f"did you mean {near!r}? " if near else "")
            own = ", or your own as package.module:Name" if self._own else ""
            raise ConfigError(
                f"{self.key}: there is no {self.what} {name[:100]!r}; {hint}Known here: {', '.join(self.table)}{own}"
            )
        found: Any = import_object(name, key=self.key)
        if not inspect.isclass(found):
            raise ConfigError(f"{self.key}: {name[:200]!r} is a {type(found).__name__}, expected a class")
        return cast("type[T]", found)

    def _elsewhere(self, name: str) -> str:
        """Which setting has this very name: other libraries have FedProx as a strategy, here it is a training rule."""
        low = name.lower()
        if low in self.table:
            return ""
        section = self.key.partition(".")[0]
        keys = [
            one.key for one in _TABLES if one.key.startswith(f"{section}.") and one is not self and low in one.table
        ]
        return f"set {' or '.join(keys)} to {low!r}. " if keys else ""

    def options_of(self, name: str) -> type[BaseModel]:
        """The model of the options of this choice. Raises ConfigError as :meth:`find` does."""
        return cast("type[BaseModel]", getattr(self.find(name), "Options", Options))

    def checked(self, choice: Choice) -> BaseModel:
        """The model of all options of a choice, with their defaults. Raises ConfigError: as :meth:`options`."""
        try:
            return self._checked(choice.name, choice.options)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False)[0]
            raise ConfigError(f"{'.'.join([self.key, *map(str, first['loc'])])}: {first['msg']}") from None

    def options(self, choice: Choice) -> dict[str, Any]:
        """All options of a choice as keyword arguments, checked, with their defaults.

        Raises:
            ConfigError: there is no such choice, or one of its options is not known, or has another type or range.
        """
        checked = self.checked(choice)
        return {field: getattr(checked, field) for field in type(checked).model_fields}

    def check_own(self, choice: Choice) -> None:
        """Check a class of the user's, which reading the settings has not imported, and its options. A built-in choice
        was checked there. Raises ConfigError: as :meth:`options`."""
        if self._own and ":" in choice.name:
            self.checked(choice)

    def make(self, choice: Choice, *arguments: Any) -> T:
        """An object of the class that is chosen, made with ``arguments`` and its options as keywords.

        Raises:
            ConfigError: as :meth:`options` does.
        """
        return self.find(choice.name)(*arguments, **self.options(choice))

    def _checked(self, name: str, given: Mapping[str, Any]) -> BaseModel:
        model = self.options_of(name)
        known = model.model_fields
        if model.model_config.get("extra") != "allow" and (unknown := given.keys() - known.keys()):
            raise ValidationError.from_exception_data(
                name, [self._unknown(name, key, given[key], known) for key in sorted(unknown)]
            )
        return model.model_validate(dict(given))

    def _unknown(self, name: str, key: str, value: Any, known: Mapping[str, Any]) -> InitErrorDetails:
        """The error about an option that the choice does not have, with whose it is."""
        owners = [other for other in self.table if key in self.options_of(other).model_fields]
        near = nearest(key, known)
        text = f"this is an option of {', '.join(owners)}" if owners else "there is no such option"
        text += f", did you mean {near!r}?" if near and not owners else f"; {name!r} has {', '.join(known) or 'none'}"
        return InitErrorDetails(type=PydanticCustomError("option", "{text}", {"text": text}), loc=(key,), input=value)

    def check(self, value: Any) -> dict[str, Any]:
        """A setting's value as name and options, the latter as their model has them.

        A class of the user's is not imported yet: to read settings runs no code that they name. :meth:`options` does,
        before a run starts.

        Raises:
            ValueError: there is no such choice, or one of its options is wrong.
        """
        if isinstance(value, Choice):
            value = value.model_dump()
        given = dict(value) if isinstance(value, Mapping) else {"name": value}
        name = given.pop("name", self.default.name)
        if not isinstance(name, str) or not 0 < len(name) <= _MAX_NAME_CHARS:
            raise ValueError(f"expected the name of a choice ({self.what}), or an object with name and options")
        if self._own and ":" in name:
            return {"name": name, **given}
        try:
            checked = self._checked(name, given)
        except ConfigError as error:  # the caller says which setting it is
            raise ValueError(str(error).removeprefix(f"{self.key}: ")) from None
        return {"name": name, **{key: getattr(checked, key) for key in given}}

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """A name, or an object for each choice with its options."""
        names: list[dict[str, Any]] = [{"enum": list(self.table)}]
        objects = []
        for name in self.table:
            inner = self.options_of(name).model_json_schema()
            fields = {"name": {"const": name, "description": self.help()[name]}, **inner.get("properties", {})}
            required = [] if name == self.default.name else ["name"]
            objects.append(
                {"type": "object", "properties": fields, "required": required, "additionalProperties": False}
            )
        if self._own:
            pattern = {"type": "string", "pattern": ":"}
            names.append(pattern)
            objects.append({"type": "object", "properties": {"name": pattern}, "required": ["name"]})
        return {"anyOf": [*names, *objects]}


class CodecChoices(Choices[T]):
    """Codecs: the built-in ones are those of :data:`gradbus.codecs.registry.TABLE`. Options travel as JSON."""

    @cached_property
    def table(self) -> Mapping[str, type[T]]:
        return cast("Mapping[str, type[T]]", importlib.import_module("gradbus.codecs.registry").TABLE)

    def find(self, name: str) -> type[T]:
        kind = super().find(name)
        if ":" in name:
            try:
                importlib.import_module("gradbus.codecs.registry").check_codec_class(kind)
            except ValueError as error:
                raise ConfigError(f"{self.key} {name[:200]!r}: {error}") from None
        return kind

    def make(self, choice: Choice, *arguments: Any) -> T:
        try:
            return super().make(choice, *arguments)
        except ConfigError:
            raise
        except (TypeError, ValueError) as error:  # a check of the class itself, beyond those of its Options
            raise ConfigError(f"{self.key} {choice.name!r}: {error}") from None

    def to_json(self, choice: Choice) -> str:
        """All options of a codec, with their defaults, as they travel. Raises ConfigError: as :meth:`options`, or they
        are no JSON, or too long."""
        return options_as_json(self.checked(choice), f"{self.key} {choice.name!r}")

    def parse_unchecked(self, name: str, text: str) -> Choice:
        """The codec that a peer has named, with the options that it has sent: :meth:`make` checks these.

        Raises:
            ValueError: the text is no JSON object, too long, or has too many values.
        """
        if len(text) > MAX_OPTIONS_CHARS:
            raise ValueError(f"options of {len(text)} characters, at most {MAX_OPTIONS_CHARS} are read")
        options = parse_json(text, max_values=_MAX_OPTION_VALUES)
        if not isinstance(options, dict):
            raise ValueError(f"options are a JSON {type(options).__name__}, expected an object")
        return Choice.model_validate({**options, "name": name})


def options_as_json(options: BaseModel, what: str) -> str:
    """All options of a codec as JSON text. ``what`` they are of, for the error.

    Raises:
        ConfigError: one cannot be JSON, or they are longer than a message has room for.
    """
    try:
        text = options.model_dump_json()
    except ValueError as error:  # PydanticSerializationError, too
        raise ConfigError(f"{what}: options travel as JSON: {error}") from None
    if len(text) > MAX_OPTIONS_CHARS or count_values(text) > _MAX_OPTION_VALUES:
        raise ConfigError(
            f"{what}: options travel as JSON text: these have {len(text)} characters and {count_values(text)} values, "
            f"at most {MAX_OPTIONS_CHARS} and {_MAX_OPTION_VALUES} are read. Name a file instead, that all have"
        )
    return text


class LibraryChoices(Choices[T]):
    """Classes of a library by name, beside those of a module of ours that says which these are.

    The module has ``LIBRARY``, its name; ``BASE``, the class that all inherit; ``classes()``, those of the library by
    name; ``options_of(kind, common)``, the model of the options of any class; and ``UNFIT``, names of others with the
    reason why they are not among them.
    """

    def __init__(self, module: str, *, common: str, **choices: Any) -> None:
        """``common``: the model in ``module`` of the options that all have. Else as for :class:`Choices`."""
        super().__init__(module, **choices)
        self._common = common

    @cached_property
    def _source(self) -> Any:
        return importlib.import_module(self._package)

    @cached_property
    def table(self) -> Mapping[str, type[T]]:
        """Those of the library, and those of the module with a ``choice``."""
        own = {kind.choice: kind for kind in vars(self._source).values() if "choice" in getattr(kind, "__dict__", {})}
        return dict(sorted({**self._source.classes(), **own}.items()))

    def help(self) -> dict[str, str]:
        """Where a class of the library is described; the first sentence of the docstring of one of ours."""
        ours = super().help()
        return {
            name: ours[name] if kind.__module__ == self._package else f"`{self._source.LIBRARY}.{kind.__name__}`"
            for name, kind in self.table.items()
        }

    def find(self, name: str) -> type[T]:
        if (reason := self._source.UNFIT.get(name)) is not None:
            raise ConfigError(f"{self.key}: {name!r} cannot be chosen: {reason}")
        kind = super().find(name)
        base = self._source.BASE
        if ":" in name and not issubclass(kind, base):
            raise ConfigError(f"{self.key}: {name!r} is no {self._source.LIBRARY}.{base.__name__}, expected one")
        return kind

    def options_of(self, name: str) -> type[BaseModel]:
        kind = self.find(name)
        own: type[BaseModel] | None = getattr(kind, "Options", None)
        return self._source.options_of(kind, getattr(self._source, self._common)) if own is None else own

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """As for any choice; of the options of the library only those that are described here."""
        whole = super().__get_pydantic_json_schema__(schema, handler)
        for one in whole["anyOf"]:
            if "const" in one.get("properties", {}).get("name", {}):
                described = {key: field for key, field in one["properties"].items() if "description" in field}
                one |= {"properties": described, "additionalProperties": len(described) < len(one["properties"])}
        return whole


def load_tables() -> None:
    """Import what all settings may name. Else the first of each kind does so where it is used: on an event loop, too,
    which waits for it."""
    for one in _TABLES:
        _ = one.table


class AlgorithmChoices(Choices[T]):
    """Algorithms, and codecs of the user's: gradients travel in the messages of a codec, with error feedback."""

    def find(self, name: str) -> type[T]:
        kind = super().find(name)
        if ":" not in name or not issubclass(kind, importlib.import_module("gradbus.codecs").Codec):
            return kind
        try:
            return cast("type[T]", importlib.import_module(f"{self._package}.codec_feedback").algorithm_of_codec(kind))
        except ValueError as error:
            raise ConfigError(f"{self.key} {name[:200]!r}: {error}") from None


STRATEGIES: Choices[Any] = Choices(
    "gradbus.actors.aggregation", key="federated.strategy", what="aggregation strategy", default="fedavg"
)
CLIENT_RULES: Choices[Any] = Choices(
    "gradbus.actors.federated.client.rules", key="federated.training.rule", what="training rule", default="plain"
)
SELECTORS: Choices[Any] = Choices(
    "gradbus.actors.federated.controller.selectors", key="federated.selection", what="selector", default="uniform"
)
PRIVACY: Choices[Any] = Choices(
    "gradbus.actors.privacy", key="federated.privacy", what="privacy mechanism", default="none", own=False
)
CODECS: CodecChoices[Any] = CodecChoices("gradbus.codecs", key="federated.codec", what="codec", default="fp32")
ALGORITHMS: Choices[Any] = AlgorithmChoices(
    "gradbus.runtime.algorithms",
    key="parallel.algorithm",
    what="algorithm of data-parallel training",
    default="dense",
)

CLIENT_OPTIMIZERS: Choices[Any] = LibraryChoices(
    "gradbus.runtime.optimization.optimizers",
    common="ClientOptimizerOptions",
    key="federated.training.optimizer",
    what="optimizer",
    default="task",
    own=False,
)
CLIENT_SCHEDULES: Choices[Any] = LibraryChoices(
    "gradbus.runtime.optimization.schedules",
    common="RoundScheduleOptions",
    key="federated.training.schedule",
    what="schedule",
    default="fixed",
)
OPTIMIZERS: Choices[Any] = LibraryChoices(
    "gradbus.runtime.optimization.optimizers",
    common="OptimizerOptions",
    key="parallel.optimizer",
    what="optimizer",
    default="sgd",
)
SCHEDULES: Choices[Any] = LibraryChoices(
    "gradbus.runtime.optimization.schedules",
    common="ScheduleOptions",
    key="parallel.schedule",
    what="schedule",
    default="fixed",
)


def import_object(spec: str, *, key: str) -> Any:
    """Import the object that ``package.module:attribute`` names.

    Args:
        key: the setting that names it, for the error.

    Raises:
        ConfigError: there is no such module or attribute, or importing the module fails.
    """
    module_name, colon, attribute = spec.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{key} {spec!r}: expected package.module:attribute, for example gradbus.models:mnist_cnn")
    target: Any = _import(module_name, spec, key)
    for name in attribute.split("."):
        if not hasattr(target, name):
            known = [known for known in dir(target) if not known.startswith("_")]
            near = nearest(name, known)
            hint = f"did you mean {near!r}?" if near else f"it has: {', '.join(known[:12]) or 'nothing'}"
            raise ConfigError(f"{key} {spec!r}: module {module_name!r} has no {name!r}; {hint}")
        target = getattr(target, name)
    return target


def _import(module_name: str, spec: str, key: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{key} {spec!r}: module {module_name!r} needs {error.name!r}: install that") from None
        raise ConfigError(
            f"{key} {spec!r}: there is no module {error.name!r}. Install it, or start in the folder that holds it"
        ) from None
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"{key} {spec!r}: importing {module_name!r} failed: {type(error).__name__}: {error} "
            f"({frame.filename}, line {frame.lineno})"
        ) from None
