"""Values in a document of the user with which Cyclone DDS 11.0 ends the process, or never returns.

Most wrong values it refuses, which is an error. These few it takes: a division by zero, an assertion, a thread that the
kernel does not make, a loop. Found by trying each element of its configuration with what it does not expect;
``tests/runtime/transport/dds/test_hostile_settings.py`` has the list. Peers, which are the most frequent of them, are
checked in :mod:`gradbus.runtime.network.addresses`.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable
from xml.etree import ElementTree as ET

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.network.addresses import parse_peer

MAX_PARTICIPANT_INDEX = 29_000  # two ports each, of 65,535
_QUANTITY = re.compile(r"([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]*)", re.ASCII)
_SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "hr": 3_600.0, "day": 86_400.0}
_MIN_INTERVAL_S = 0.001


def check_fatal_values(document: ET.Element, where: str) -> None:
    """Raise ConfigError: the document has such a value. ``where``: it is from, for the error."""
    for element in document.iter():
        check = _CHECKS.get(element.tag.casefold())
        fault = "" if check is None else check(element)
        if fault:
            raise ConfigError(f"{where}: <{element.tag}>: {fault}")


def _text(element: ET.Element | None) -> str:
    return "" if element is None else (element.text or "").strip()


def _child(element: ET.Element, name: str) -> str:
    return _text(next((child for child in element if child.tag.casefold() == name), None))


def _fragment_size(element: ET.Element) -> str:
    text = _text(element)
    found = _QUANTITY.fullmatch(text)
    if not text or (found is not None and float(found[1]) >= 1):
        return ""
    return f"{text!r} is no size: expected a number of at least 1 with a unit, such as 1300B"


def _spdp_interval(element: ET.Element) -> str:
    text = _text(element)
    found = _QUANTITY.fullmatch(text)
    if text in ("", "default", "inf"):
        return ""
    if found is not None and float(found[1]) * _SECONDS.get(found[2], 0.0) >= _MIN_INTERVAL_S:
        return ""
    return f"{text!r}: expected a number with a unit that is 1ms or more, such as 2s: Cyclone DDS would never rest"


def _most_participants(element: ET.Element) -> str:
    text = _text(element)
    if text.isascii() and text.isdecimal() and (len(text) > 9 or int(text) > MAX_PARTICIPANT_INDEX):
        return f"{text} is more than UDP has ports for: expected at most {MAX_PARTICIPANT_INDEX}"
    return ""


def _transport(element: ET.Element) -> str:
    if _text(element).casefold() not in ("udp", "udp6", "default", ""):
        return f"{_text(element)!r}: gradbus uses UDP alone, 'udp' or 'udp6'. Leave the element out"
    return ""


def _network_partition(element: ET.Element) -> str:
    """Names may stand for anything, so these are addresses alone."""
    given = ",".join(value for name, value in element.items() if name.casefold() == "address" and value)
    for address in given.split(",") if given else []:
        try:
            if parse_peer(address.strip(), "").is_name:
                return f"{address!r} is a name: expected IP addresses"
        except ConfigError:
            return f"{address!r} is no address: expected IP addresses"
    return ""


def _scheduling(element: ET.Element) -> str:
    """A thread that cannot be made ends the process; so one is tried here."""
    kind, text = _child(element, "class").casefold() or "default", _child(element, "priority") or "0"
    if not re.fullmatch(r"-?[0-9]{1,9}", text) or kind not in ("realtime", "timeshare", "default"):
        return ""  # Cyclone refuses these
    priority = int(text)
    if kind == "default":
        return "" if priority == 0 else f"priority {priority} needs a class: add <Class>realtime</Class>"
    if kind == "timeshare" or not hasattr(os, "sched_setscheduler"):
        return ""
    refusals: list[OSError] = []
    trial = threading.Thread(target=_try_realtime, args=(priority, refusals), name="gradbus-trial")
    trial.start()
    trial.join()
    if not refusals:
        return ""
    least, most = (limit(os.SCHED_FIFO) for limit in (os.sched_get_priority_min, os.sched_get_priority_max))
    return (
        f"class realtime with priority {priority} is refused here: {refusals[0].strerror}. Expected {least} to {most}, "
        f"and the right to it (CAP_SYS_NICE, or rtprio in limits.conf)"
    )


def _try_realtime(priority: int, refusals: list[OSError]) -> None:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(priority))  # of this thread, which ends with it
    except OSError as error:
        refusals.append(error)


_CHECKS: dict[str, Callable[[ET.Element], str]] = {
    "fragmentsize": _fragment_size,
    "spdpinterval": _spdp_interval,
    "maxautoparticipantindex": _most_participants,
    "transport": _transport,
    "networkpartition": _network_partition,
    "scheduling": _scheduling,
}
