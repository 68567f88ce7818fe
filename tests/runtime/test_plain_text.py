"""What peers say of themselves cannot drive a terminal, hide, or look like a line of another."""

from __future__ import annotations

import io
import unicodedata

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from gradbus.commands import lifecycle
from gradbus.commands.report.page import Page, Tile, render
from gradbus.commands.run.live import head, warning
from gradbus.commands.run.status import Observer, lines_of
from gradbus.runtime import logs
from gradbus.runtime.plain_text import plain_but_colours, plain_line, plain_text
from gradbus.runtime.wire import control
from gradbus.runtime.wire.control import (
    PROTOCOL,
    GroupHello,
    GroupLeave,
    Hello,
    RankStatus,
    Refused,
    Status,
    TrainingFailure,
)
from gradbus.runtime.wire.frames import CONTROLLER
from gradbus.runtime.wire.messages import Control

SEQUENCES = [
    "\x1b[2J", "\x1b]0;title\x07", "\x1b[31m", "\x9b2J", "\x9d0;t\x9c", "\x08\x08", "\r", "\x7f", "\u202e", "\u2066",
    "\u2069", "\u200e", "\u200f", "\u061c", "\u200b", "\u200d", "\ufeff", "\u2028", "\u2029", "\u00ad", "\U000e0041",
]  # fmt: skip
HOSTILE = "robot-7" + "".join(SEQUENCES) + "\n[info     ] all well"


def harmless(text: str, *, lines: bool = False) -> bool:
    """Whether a terminal shows it as it is, and from left to right."""
    return all(char in ("\n\t" if lines else "") or unicodedata.category(char)[0] not in "C" for char in text) and (
        lines or len(text.splitlines()) <= 1
    )


@given(st.text(st.characters(exclude_categories=())))
def test_any_text_becomes_harmless_and_stays_as_it_is_the_second_time(text: str) -> None:
    assert harmless(plain_text(text), lines=True)
    assert harmless(plain_line(text))
    assert plain_text(plain_text(text)) == plain_text(text)
    assert plain_line(plain_line(text)) == plain_line(text)
    assert harmless(plain_but_colours(text).replace("\x1b", ""), lines=True)


@pytest.mark.parametrize("sequence", SEQUENCES, ids=ascii)
def test_each_sequence_that_a_terminal_obeys_or_an_eye_misses_is_replaced(sequence: str) -> None:
    assert not set(sequence) - set(map(chr, range(32, 127))) & set(plain_text(f"a{sequence}b"))
    assert plain_line(f"a{sequence}b").startswith("a\N{REPLACEMENT CHARACTER}")


def test_words_of_all_languages_stay() -> None:
    words = "Grüße, 工場 3, ロボット, 10\N{NARROW NO-BREAK SPACE}000, שלום, مرحبا, é"
    assert plain_line(words) == words


def test_colours_of_our_own_stay_and_nothing_else_does() -> None:
    assert plain_but_colours("\x1b[1;31mbad\x1b[0m\x1b[2J") == "\x1b[1;31mbad\x1b[0m\N{REPLACEMENT CHARACTER}[2J"


@pytest.mark.parametrize(
    "body",
    [
        Hello(PROTOCOL, 9, 9, True, 1, HOSTILE, 4, 3, HOSTILE, 1),
        Status(5, 1, HOSTILE, 0, 0, HOSTILE, dropped={HOSTILE: 3}),
        Refused(1, 2, HOSTILE),
        GroupHello("g", 2, 0, False, False, 1, HOSTILE, "", []),
        GroupLeave("g", 0, False, HOSTILE, [1], [HOSTILE]),
        RankStatus("g", 2, HOSTILE, 1.0, oldest=HOSTILE, dropped={HOSTILE: 1}),
        TrainingFailure(1, 2, HOSTILE),
    ],
    ids=lambda body: type(body).__name__,
)
def test_what_a_peer_says_for_people_is_made_plain_as_it_is_read(body: control.Body) -> None:
    packed = control.encode(body)
    read = control.decode(packed)
    for name in body.__dataclass_fields__:
        value = getattr(read, name)
        for text in [value] if isinstance(value, str) else list(value) if isinstance(value, dict | list) else []:
            assert not isinstance(text, str) or harmless(text, lines=isinstance(body, TrainingFailure)), (name, text)


def test_status_of_hostile_members_is_harmless_on_a_terminal() -> None:
    observer = Observer()
    observer.take(Control(CONTROLLER, 1, Status(5, 1, HOSTILE, 0, 1, HOSTILE, dropped={HOSTILE: 1})), 1.0)
    observer.take(Control(3, 2, Hello(PROTOCOL, 9, 9, True, 1, HOSTILE, 4, 3, HOSTILE, 1)), 1.0)
    observer.take(Control(0, 3, RankStatus(HOSTILE, 2, HOSTILE, 1.0, pending=1, oldest=HOSTILE, oldest_s=9.0)), 1.0)
    lines = lines_of(observer.picture(HOSTILE, 1.1))
    assert len(lines) > 5
    assert all(map(harmless, lines))


@pytest.mark.parametrize("colours", [False, True])
def test_a_log_for_people_shows_hostile_values_as_one_harmless_line(
    monkeypatch: pytest.MonkeyPatch, colours: bool
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return colours

    terminal, before = Terminal(), structlog.get_config()
    monkeypatch.setattr("sys.stderr", terminal)
    try:
        logs.configure(style="console")
        log = logs.get_logger("controller")
        log.warning("join refused", node=HOSTILE.replace("\n", "").replace("\r", ""), reason=HOSTILE)
        log.error("training failed on a client", error=HOSTILE, known=[HOSTILE])
        log.error(HOSTILE)
    finally:
        structlog.configure(**before)
    text = terminal.getvalue()
    assert ("\x1b[" in text) == colours  # its own
    assert "\x1b[31mrobot" not in text
    assert harmless(text.replace("\x1b", ""), lines=True)
    assert len(text.splitlines()) == 3


def test_the_last_line_of_a_command_and_its_tables_are_harmless(capsys: pytest.CaptureFixture[str]) -> None:
    lifecycle.say(HOSTILE)
    assert harmless(capsys.readouterr().err.rstrip("\n"))
    shown = io.StringIO()
    console = Console(file=shown, width=200)
    console.print(head(HOSTILE, 1, 2, "rounds", 200))
    console.print(warning(HOSTILE))
    assert all(map(harmless, shown.getvalue().split("\n")))


def test_a_report_has_nothing_in_it_that_turns_its_text_round() -> None:
    page = Page(title=HOSTILE + "<script>", lead=HOSTILE, tiles=[Tile(name="\ud800", value=HOSTILE)], notes=[HOSTILE])
    text = render(page)
    assert not [sequence for sequence in ("\u202e", "\x1b", "\ud800", "<script>") if sequence in text]
