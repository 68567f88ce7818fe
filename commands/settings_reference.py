"""All settings of the configuration files as a text, as a page, and as JSON schemas: ``gradbus config``.

Everything here is derived from the settings classes, through the JSON schema that pydantic makes of them.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gradbus.commands.files import AggregatorFile, ClientFile, ControllerFile, WorkerFile
from gradbus.commands.relay.settings import RelayFile
from gradbus.runtime.config.settings import Settings

FILES: dict[str, type[Settings]] = {
    "controller": ControllerFile,
    "client": ClientFile,
    "worker": WorkerFile,
    "aggregator": AggregatorFile,
    "relay": RelayFile,
}

_PAGE = """\
# Settings

Every setting of the files that `gradbus controller`, `gradbus client` and `gradbus worker` read: a JSON or TOML file
with sections. In a shell in which `. .venv/bin/activate` has run, `gradbus config reference` prints the same list. This
page is made by it; after a change of the text below a setting in the code, make it anew:

```sh
gradbus config reference --markdown > docs/settings.md
```

A setting of a section can also be given in the environment (`GRADBUS_FEDERATED__ROUNDS=20`), every setting on the
command line (`--set federated.rounds=20`), which is the strongest. Settings in a group have the group's name in
between: `"federated": {"clients": {"num": 2}}`, `GRADBUS_FEDERATED__CLIENTS__NUM=2`, `--set federated.clients.num=2`.

A choice is given by its name alone (`"codec": "sq8"`, `--set federated.codec=sq8`), or with options of its own
(`"codec": {"name": "sq8", "density": 0.01}`, `--set federated.codec.name=sq8 --set federated.codec.density=0.01`). To
name another choice, in a source that is stronger, drops the options of the one before it.

Paths are relative to the directory in which the command starts; `null` stands for a value that is not given.
[operations.md](operations.md) and [tuning.md](tuning.md) tell which settings matter when.

`gradbus config schema controller > controller.schema.json` (or `client`, `worker`) writes a JSON schema, with which an
editor completes keys, shows these texts and marks mistakes: name that file for `controller.json` in the settings of the
editor.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One line of the reference. ``type`` and ``default`` are texts, the default as JSON."""

    name: str
    type: str
    default: str
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SettingsSection:
    """The settings of one section of the files, or of a group in it such as ``federated.clients``, and the commands
    that read it. ``name`` is empty for the top level."""

    name: str
    commands: tuple[str, ...]
    text: str
    settings: tuple[Setting, ...]


def json_schema(kind: str) -> dict[str, Any]:
    """JSON schema (draft 2020-12) of the file that ``gradbus KIND`` reads."""
    schema = _tidy(FILES[kind].model_json_schema())
    for model in (schema, *schema["$defs"].values()):
        for field in model["properties"].values():
            if "$ref" in field:  # the settings of the group have their own defaults
                field.pop("default", None)
    heading = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": f"gradbus {kind}"}
    return {**heading, **{key: value for key, value in schema.items() if key != "title"}}


def sections() -> list[SettingsSection]:
    """All sections: the top level of each file that has settings there, then one for each section and group."""
    top: list[SettingsSection] = []
    named: dict[str, SettingsSection] = {}
    for kind in FILES:
        schema = json_schema(kind)
        for name, model in _groups(schema, schema):
            settings = tuple(_settings(f"{name}." if name else "", model["properties"]))
            if not name and settings:
                top.append(SettingsSection(name="", commands=(kind,), text=model["description"], settings=settings))
            elif settings:
                commands = (*(named[name].commands if name in named else ()), kind)
                named[name] = SettingsSection(
                    name=name, commands=commands, text=model["description"], settings=settings
                )
    order = [name for kind in FILES.values() for name in kind.model_fields]
    return [*top, *sorted(named.values(), key=lambda section: order.index(section.name.partition(".")[0]))]


def _groups(schema: dict[str, Any], model: dict[str, Any], name: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas of a file, its sections and the groups in them, by their names."""
    yield name, model
    for key, field in model["properties"].items():
        if "$ref" in field:
            inner = schema["$defs"][field["$ref"].rpartition("/")[2]]
            yield from _groups(schema, inner, f"{name}.{key}" if name else key)


def as_text() -> str:
    """The reference for a terminal."""
    lines: list[str] = []
    for section in sections():
        lines += [f"# {_heading(section)}. {_readers(section)}".replace("`", ""), ""]
        for setting in section.settings:
            lines.append(f"{setting.name} = {setting.default}    ({setting.type})")
            lines += textwrap.wrap(setting.text, 100, initial_indent="    ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def as_markdown() -> str:
    """The page docs/settings.md."""
    lines = [_PAGE]
    for section in sections():
        lines += [
            f"{'###' if '.' in section.name else '##'} {_heading(section)}",
            "",
            f"{_linked(section.text)} {_readers(section)}",
            "",
        ]
        lines += ["| setting | type | default | what it does |", "|---|---|---|---|"]
        lines += [
            f"| `{setting.name}` | {setting.type} | `{setting.default}` | {_linked(setting.text)} |"
            for setting in section.settings
        ]
        lines.append("")
    return "\n".join(lines[:-1]) + "\n"


def _heading(section: SettingsSection) -> str:
    if "." in section.name:
        return f"Group {section.name}"
    return f"Section {section.name}" if section.name else f"Top level of {section.commands[0]} files"


def _readers(section: SettingsSection) -> str:
    return f"Read by {', '.join(f'`gradbus {command}`' for command in section.commands)}."


def _linked(text: str) -> str:
    """A text for the page: pages of the documentation become links."""
    return re.sub(r"docs/([\w-]+\.md)", r"[\1](\1)", text).replace("|", "\\|")


def _settings(prefix: str, fields: dict[str, Any]) -> Iterator[Setting]:
    for name, field in fields.items():
        if "$ref" not in field:
            default, text = field["default"], field.get("description", "")
            choices = _choices(field)
            if choices:
                default = default["name"]
            shown = json.dumps(default, ensure_ascii=False)
            yield Setting(name=prefix + name, type=_type(field), default=shown, text=text)
            yield from _options(f"{prefix}{name}.", choices)


def _choices(field: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each choice that a setting may name; empty for other settings."""
    found = (choice.get("properties", {}) for choice in field.get("anyOf", ()))
    return {fields["name"]["const"]: fields for fields in found if "const" in fields.get("name", {})}


def _options(prefix: str, choices: dict[str, dict[str, Any]]) -> Iterator[Setting]:
    """One line for each option, with the choices that have it."""
    owners: dict[Setting, list[str]] = {}
    for choice, fields in choices.items():
        for setting in _settings(prefix, {name: field for name, field in fields.items() if name != "name"}):
            owners.setdefault(setting, []).append(f"`{choice}`")
    for setting, names in owners.items():
        of_some = f"With {', '.join(names)}. " if len(names) < len(choices) else ""
        yield replace(setting, text=of_some + setting.text)


def _type(field: dict[str, Any]) -> str:
    """The type in words, with its limits."""
    if names := _choices(field):
        own = " or package.module:Name" if any("pattern" in choice for choice in field["anyOf"]) else ""
        return f"choice: {', '.join(f'`{name}`' for name in names)}{own}"
    if "anyOf" in field:
        return " or ".join(map(_type, field["anyOf"]))
    if choices := field.get("enum", [field["const"]] if "const" in field else []):
        return ", ".join(f"`{choice}`" for choice in choices)
    if isinstance(field["type"], list):
        return " or ".join(_type({"type": one}) for one in field["type"])
    if field["type"] == "array":
        return f"list of {_type(field['items'])}"
    if field["type"] == "string":
        return "path" if field.get("format") == "path" else "text"
    return f"{field['type']}{_limits(field)}"


def _limits(field: dict[str, Any]) -> str:
    signs = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
    limits = [
        f"{sign} {int(value) if value == int(value) else value}"
        for name, sign in signs.items()
        if (value := field.get(name)) is not None
    ]
    return f" {', '.join(limits)}" if limits else ""


def _tidy(schema: Any) -> Any:
    """Drop the titles that pydantic makes of names, and put each description into one line, without Sphinx's roles."""
    if isinstance(schema, list):
        return [_tidy(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {key: _tidy(value) for key, value in schema.items() if not (key == "title" and isinstance(value, str))}
    if isinstance(text := kept.get("description"), str):
        kept["description"] = re.sub(r"(:\w+:)?`+", "`", " ".join(text.split()))
    return kept
