"""The model of joining (docs/joining.pv): its claims are proved, and in weaker protocols the fault is found."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gradbus.runtime.security.identity import handshake
from gradbus.runtime.security.identity.join_messages import JoinKind

MODEL = Path(__file__).parents[3] / "docs" / "joining.pv"
TEXT = MODEL.read_text(encoding="utf-8")
PROVERIF = shutil.which("proverif")
GRANTED, SENT, ADMITTED, JOINED, OPENED, ENDS = range(6)  # the queries, in their order

CHECK_HELLO = "    if check(helloSig, (HELLO, j, hello), pkN) = true then\n"
CHECK_WELCOME = "  if check(welcomeSig, (WELCOME, j, t), pkS) = true then\n"
CHECK_CONFIRM = "    if check(confirmSig, (CONFIRM, j, t, welcomeSig, tag), pkN) = true then\n"


def results(text: str, folder: Path, *, queries: list[int]) -> list[str]:
    """What ProVerif says of some of the claims: true, false, or that it cannot be proved."""
    declared = re.findall(r"^query .*?\.\n", text, re.MULTILINE | re.DOTALL)
    assert len(declared) == 6
    for number, query in enumerate(declared):
        if number not in queries:
            text = text.replace(query, "")
    file = folder / "joining.pv"
    file.write_text(text, encoding="utf-8")
    assert PROVERIF is not None
    done = subprocess.run([PROVERIF, str(file)], capture_output=True, text=True, timeout=100, check=True)
    return re.findall(r"^RESULT .* (is true|is false|cannot be proved)\.$", done.stdout, re.MULTILINE)


def without(*lines: str) -> str:
    text = TEXT
    for line in lines:
        assert text.count(line) == 1
        text = text.replace(line, "")
    return text


def test_the_model_has_the_messages_and_the_keys_of_the_program() -> None:
    for kind in (JoinKind.HELLO, JoinKind.WELCOME, JoinKind.CONFIRM):
        assert f"(({kind.name}, j" in TEXT or f"sign(({kind.name}, j" in TEXT
    names = {name for name in handshake.Secrets._fields if name != "transcript"}
    assert names == {"up", "down", "confirm"}
    assert all(f"kdf(z, t, {name})" in TEXT for name in ("UP", "DOWN", "TAG"))


@pytest.mark.skipif(PROVERIF is None, reason="there is no proverif")
def test_every_claim_is_proved_and_not_for_want_of_exchanges(tmp_path: Path) -> None:
    found = results(TEXT, tmp_path, queries=list(range(6)))
    assert found[:ENDS] == ["is true"] * ENDS
    assert found[ENDS] in ("is false", "cannot be proved")


@pytest.mark.skipif(PROVERIF is None, reason="there is no proverif")
def test_the_faults_of_weaker_protocols_are_found(tmp_path: Path) -> None:
    assert results(without(CHECK_HELLO, CHECK_CONFIRM), tmp_path, queries=[GRANTED]) != ["is true"]
    assert results(without(CHECK_WELCOME), tmp_path, queries=[SENT]) != ["is true"]
    unbound = TEXT.replace("sign((WELCOME, j, t), sk)", "sign((WELCOME, j, nS), sk)")
    unbound = unbound.replace("check(welcomeSig, (WELCOME, j, t), pkS)", "check(welcomeSig, (WELCOME, j, nS), pkS)")
    assert unbound != TEXT
    assert results(unbound, tmp_path, queries=[SENT]) != ["is true"]
