"""``gradbus config``: every setting is explained, and docs/settings.md is what the command prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from gradbus.commands.choices import FileKind
from gradbus.commands.settings_reference import FILES, as_markdown, as_text, json_schema, sections
from gradbus.runtime.choices import Choice, Choices
from gradbus.runtime.config.bus import BusSettings, default_job

GRADBUS = Path(sys.executable).parent / "gradbus"


@pytest.fixture
def config(invoke: Any) -> Callable[..., str]:
    """What ``gradbus config`` prints with these words, in this process."""

    def printed(*words: str) -> str:
        ended = invoke("config", *words)
        assert (ended.code, ended.err) == (0, "")
        return str(ended.out)

    return printed


def names_of(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in kind.model_fields.items():
        inner: Any = field.annotation
        if inner is Choice:
            yield prefix + name
            (table,) = (mark for mark in field.metadata if isinstance(mark, Choices))
            models = [table.options_of(choice).model_fields for choice in table.table]
            # Classes of torch have more options, which its own documentation describes.
            options = {key for fields in models for key, option in fields.items() if option.description}
            yield from (f"{prefix}{name}.{key}" for key in options)
        elif isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from names_of(inner, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_the_page_is_what_the_command_prints(root: Path, config: Callable[..., str]) -> None:
    page = (root / "docs" / "settings.md").read_text(encoding="utf-8")
    assert page == config("reference", "--markdown"), "run: make docs"


def test_the_page_and_the_schemas_do_not_depend_on_the_user() -> None:
    text = as_markdown() + json.dumps([json_schema(kind) for kind in FILES])
    assert default_job() not in text
    assert '`"default-{user}"`' in text
    assert BusSettings().job == default_job()


@pytest.mark.parametrize("kind", FILES)
def test_the_reference_has_every_setting_of_a_file(kind: str) -> None:
    shown = [setting.name for section in sections() if kind in section.commands for setting in section.settings]
    assert sorted(set(shown)) == sorted(names_of(FILES[kind]))  # options of one name may differ from choice to choice


def test_every_setting_has_a_type_and_is_explained_by_whole_sentences() -> None:
    for setting in [setting for section in sections() for setting in section.settings]:
        assert setting.type, setting.name
        assert setting.text[:1].isupper(), f"{setting.name} has no text below it"
        assert setting.text.endswith("."), setting.name


def test_the_reference_for_a_terminal_shows_name_default_type_and_text(config: Callable[..., str]) -> None:
    text = config("reference")
    assert text == as_text()
    assert "\nfederated.rounds = 10    (integer >= 1, <= 1000000)\n    Number of rounds in all" in text
    codecs = "`fp32`, `loco`, `q2`, `q4`, `q8`, `s4`, `sq8` or package.module:Name"
    assert f'\nfederated.codec = "fp32"    (choice: {codecs})\n' in text
    assert "\nparallel.algorithm.density = 0.001    (number > 0, <= 1)\n    With `dgc`. Share of" in text


def test_a_reader_that_ends_early_is_no_error() -> None:
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {GRADBUS} config reference | head -1"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("kind", get_args(FileKind))
def test_a_schema_knows_the_settings_of_its_file_and_no_others(kind: FileKind, config: Callable[..., str]) -> None:
    schema = json.loads(config("schema", kind))
    assert schema == json_schema(kind)
    assert schema["properties"].keys() == FILES[kind].model_fields.keys()
    assert schema["additionalProperties"] is False
    for inner in schema["$defs"].values():
        assert inner["additionalProperties"] is False
        assert all(field["description"] for field in inner["properties"].values() if "$ref" not in field)


def test_there_is_a_schema_for_every_kind_of_file() -> None:
    assert list(get_args(FileKind)) == list(FILES)
