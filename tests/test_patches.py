"""``monkeypatch`` on classes whose methods other threads call: what it has put there is destroyed last."""

from __future__ import annotations

from collections.abc import Callable

import pytest


def test_what_was_put_into_a_class_is_destroyed_when_all_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []

    class Target:
        other = "original"

        def method(self) -> None:
            pass

    class Ends:
        def __del__(self) -> None:
            seen.append(Target.other)

    def method_with(held: Ends) -> Callable[[Target], None]:
        return lambda _: seen.append(repr(held))

    with monkeypatch.context() as patch:
        patch.setattr(Target, "other", "patched")
        patch.setattr(Target, "method", method_with(Ends()))  # the last is undone first
        assert seen == []
    assert seen == ["original"]
