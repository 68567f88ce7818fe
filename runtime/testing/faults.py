"""Faults to order: which sample is lost, late, doubled, out of turn or damaged, and at which a process dies.

    faults = Faults("drop update p=0.1; delay receipt seconds=0.3; corrupt model nth=2; seed=7")

A rule is ``ACTION [WHAT] [key=value ...]``; rules are separated by semicolons or lines.

    ACTION  drop, delay, duplicate, reorder, corrupt, crash
    WHAT    command, update, model, control, collective, store, or one kind of control message, such as hello,
            upload_request or receipt. Without it: any.
    round=N     only in this round or step
    p=X         the share of those that match; by default all of them
    nth=N       only the N-th that matches, from 1
    times=N     so often at most
    seconds=X   delay: how late (0.1). reorder: how long it is held back at most for one that overtakes it (0.1)

Which samples a rule strikes depends on the seed and on their number among those that match, and on nothing else: not
on the time, nor on other rules. They are applied by
:mod:`gradbus.runtime.testing.fault_injection`.
"""

from __future__ import annotations

import random
import re
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any, get_args

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.nearest import nearest
from gradbus.runtime.wire.control import Body, kind_name

ACTIONS = ("drop", "delay", "duplicate", "reorder", "corrupt", "crash")
TOPIC_NAMES = ("command", "update", "model", "control", "collective", "store")
CONTROL_NAMES = tuple(sorted(kind_name(kind) for kind in get_args(Body)))
FORM = "A rule is ACTION [WHAT] [key=value ...], such as 'drop update p=0.02'; rules are separated by semicolons"
_MAX_SECONDS = 3600.0
_NUMBERS = {"round": True, "p": False, "nth": True, "times": True, "seconds": False}  # whether they are whole ones


@dataclass(frozen=True, slots=True)
class Rule:
    """One kind of fault; see the head of this file. ``what``: empty for any."""

    action: str
    what: str = ""
    round: int | None = None
    p: float = 1.0
    nth: int | None = None
    times: int | None = None
    seconds: float = 0.1

    def __post_init__(self) -> None:
        if self.action not in ACTIONS:
            near = nearest(self.action, ACTIONS)
            hint = f"did you mean {near!r}? Expected" if near else "expected"
            raise ConfigError(f"fault {self.action!r}: {hint} one of {', '.join(ACTIONS)}")
        if self.what and self.what not in TOPIC_NAMES + CONTROL_NAMES:
            known = TOPIC_NAMES + CONTROL_NAMES
            near = nearest(self.what, known)
            hint = f"did you mean {near!r}? Expected" if near else "expected"
            raise ConfigError(
                f"fault {self.action!r} of {self.what!r}: {hint} one of {', '.join(known)}, or nothing for any"
            )
        if self.action == "corrupt" and self.what == "command":
            raise ConfigError(f"fault {self}: a command has no octets to damage; drop or delay it")
        if not 0 <= self.p <= 1 or not 0 <= self.seconds <= _MAX_SECONDS:
            raise ConfigError(f"fault {self}: p must be within 0 .. 1, seconds within 0 .. {_MAX_SECONDS:g}")
        if any(number is not None and number < 1 for number in (self.nth, self.times)):
            raise ConfigError(f"fault {self}: nth and times count from 1, got nth={self.nth}, times={self.times}")

    def __str__(self) -> str:
        return f"{self.action} {self.what or 'any'}"


def parse_rules(text: str) -> tuple[list[Rule], int]:
    """The rules of a text, and its seed. Raises ConfigError: what is wrong with which rule, and what would be right."""
    rules, seed = [], 0
    for part in text.replace("\n", ";").split(";"):
        words = part.split()
        if not words:
            continue
        try:
            if len(words) == 1 and words[0].startswith("seed="):
                seed = int(_number(part, words[0].removeprefix("seed="), whole=True))
            else:
                rules.append(_parse_rule(part, words))
        except ConfigError as error:
            meant = _in_form(part)
            raise ConfigError(f"{error}. {f'Write {meant!r}. ' if meant else ''}{FORM}") from None
    return rules, seed


def _parse_rule(part: str, words: list[str]) -> Rule:
    what = words[1] if len(words) > 1 and "=" not in words[1] else ""
    given: dict[str, Any] = {}
    for word in words[2 if what else 1 :]:
        key, sign, value = word.partition("=")
        if not sign or key not in _NUMBERS:
            raise ConfigError(f"fault {part.strip()!r}: {word!r} is not one of {', '.join(_NUMBERS)} with a number")
        given[key] = _number(part, value, whole=_NUMBERS[key])
    return Rule(words[0], what, **given)


def _in_form(part: str) -> str:
    """The rule that a text such as ``drop=0.02`` or ``delay(update, 0.1)`` has the words of, in the right form; empty:
    it has not."""
    words = re.findall(r"[a-z_]+|[0-9.]+", part.lower())
    found, key = words[:1], ""
    for word in words[1:]:
        if word in _NUMBERS and not key:
            key = word
        elif word[0].isdigit() or word[0] == ".":
            found.append(f"{key or ('seconds' if words[0] == 'delay' else 'p')}={word}")
            key = ""
        else:
            found.append(word)
    try:
        _parse_rule(part, found or [""])
    except ConfigError:
        return ""
    return "" if key else " ".join(found)


def _number(part: str, text: str, *, whole: bool) -> float:
    try:
        return int(text) if whole else float(text)
    except ValueError:
        kind = "a whole number" if whole else "a number"
        raise ConfigError(f"fault {part.strip()!r}: expected {kind}, got {text!r}") from None


class Faults:
    """Rules, and how often each has struck. May be asked from several threads.

    Attributes:
        rules: in order. fired: how often each action struck what, as in ``fired["drop update"]``.
    """

    def __init__(self, rules: str | list[Rule] = "", *, seed: int | None = None) -> None:
        """``seed``: in place of the one in the text. Raises ConfigError."""
        self.rules, said = parse_rules(rules) if isinstance(rules, str) else (list(rules), 0)
        self._seed = said if seed is None else seed
        self._lock = threading.Lock()
        self._seen = [0] * len(self.rules)
        self._struck = [0] * len(self.rules)
        self.fired: Counter[str] = Counter()

    def strike(self, names: tuple[str, ...], round_id: int | None) -> list[tuple[Rule, random.Random]]:
        """The faults of the next sample, each with random numbers of its own.

        Args:
            names: what it is: its topic, and the kind of a control message.
            round_id: of which round or step; None: of none.
        """
        found = []
        with self._lock:
            for index, rule in enumerate(self.rules):
                if (rule.what and rule.what not in names) or (rule.round is not None and rule.round != round_id):
                    continue
                self._seen[index] += 1
                number = self._seen[index]
                dice = random.Random(f"{self._seed}/{index}/{number}")
                if (rule.nth is not None and rule.nth != number) or dice.random() >= rule.p:
                    continue
                if rule.times is not None and self._struck[index] >= rule.times:
                    continue
                self._struck[index] += 1
                self.fired[str(rule)] += 1
                found.append((rule, dice))
        return found
