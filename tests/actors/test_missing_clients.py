"""A round that cannot start names the clients that were there: when and why they went, and what to do about that."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import re
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
from dds_domains import new_domain
from patience import PATIENT_S, eventually, run

import gradbus
from gradbus.actors.federated.client.client import Client
from gradbus.actors.federated.controller import selection
from gradbus.models import NoopTask
from gradbus.runtime.errors import BarrierTimeout

_jobs = itertools.count()


class Leaving:
    """Ends its client after the first round."""

    def on_report(self, report: Any) -> bool:
        return True


class Failing:
    """Raises after the first round."""

    def on_report(self, report: Any) -> None:
        raise KeyError("battery")


class Pausing:
    """Pauses its client after the first round. ``client``: set by the test."""

    client: Client

    def on_report(self, report: Any) -> None:
        self.client.pause()


def error_of(
    monkeypatch: pytest.MonkeyPatch, callback: Any, *, num: int | None = 2, is_over: Callable[[Any], bool]
) -> BarrierTimeout:
    """The error of a controller whose client 1 has this callback. ``is_over``: whether the deadline for the start of a
    round has passed, by the registry of clients."""
    registries: list[Any] = []
    wait = selection.ParticipantSelection.wait_for_start

    async def waiting(self: Any, round_id: int, *arguments: Any, **options: Any) -> None:
        if round_id == 2:
            await eventually(lambda: is_over(self._registry))
            registries.append(self._registry)
        await wait(self, round_id, *arguments, **options)

    class UntilOver(selection.StartCondition):
        def may_start(self, ready: Sequence[int], now_s: float, paused: Collection[int] = ()) -> bool:
            return super().may_start(ready, math.inf if registries else now_s, paused)

    monkeypatch.setattr(selection.ParticipantSelection, "wait_for_start", waiting)
    monkeypatch.setattr(selection, "StartCondition", UntilOver)

    async def main() -> BarrierTimeout:
        place: dict[str, Any] = {"job": f"missing-{os.getpid()}-{next(_jobs)}", "domain": new_domain()}
        clients = {"num": num, "min": 2, "start_timeout_s": PATIENT_S, "heartbeat_s": 0.1}
        config = gradbus.FederatedConfig(rounds=2, eval_every=0, clients=clients)
        async with (
            gradbus.connect(**place) as bus,
            gradbus.connect(**place) as first,
            gradbus.connect(**place) as other,
        ):
            callback.client = Client(other, NoopTask(5), client_id=1, callbacks=[callback])
            both = Client(first, NoopTask(5), client_id=0), callback.client
            running = [asyncio.create_task(one.run()) for one in both]
            try:
                with pytest.raises(BarrierTimeout) as caught:
                    await gradbus.Controller(bus, NoopTask(5), config).run()
            finally:
                for one in running:
                    one.cancel()
                await asyncio.wait(running)
        return caught.value

    return run(main())


def has_gone(registry: Any) -> bool:
    return registry.incarnation_of(1) is None


@pytest.mark.parametrize("num", [2, None])
@pytest.mark.parametrize(
    ("callback", "why", "remedy"),
    [
        (Leaving, f"{__name__}:Leaving.on_report has ended it", "Start it again"),
        (Failing, "failed: .*KeyError: 'battery'", "Mend it there and start the client again"),
    ],
)
def test_a_client_that_was_there_is_named_with_when_and_why_it_went(
    monkeypatch: pytest.MonkeyPatch, callback: Any, why: str, remedy: str, num: int | None
) -> None:
    error = error_of(monkeypatch, callback(), num=num, is_over=has_gone)
    missing = r", missing \[1\]" if num else ""
    text = rf"^round 2 cannot start: clients: 1 of 2 ready after {PATIENT_S:g} s{missing}\. "
    gone = rf"Client 1 was here until \d+ s ago, and has left: {why}.*\. {remedy}"
    assert re.search(text + gone, str(error)), str(error)
    assert ("INTERFACE" in str(error)) == (num is None)  # of how to reach those that never came
    assert error.missing == ((1,) if num else ())


def test_a_client_that_is_paused_is_not_to_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    error = error_of(monkeypatch, Pausing(), is_over=lambda registry: registry.paused_ids() == {1})
    assert str(error).endswith("Client 1 is here and paused: it takes part again once its program calls resume()")
