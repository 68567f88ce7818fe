"""How the program around a client follows it, without a client."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import torch
from patience import PATIENT_S

from gradbus.actors.federated.client.client_observer import ClientObserver
from gradbus.actors.federated.model.named_model import ArrivedModel


class Held:
    """A callback that holds each model until it may go on."""

    def __init__(self) -> None:
        self.began, self.goes_on = threading.Event(), threading.Event()
        self.models: list[int] = []

    def on_model(self, round_id: int, model: dict[str, Any]) -> None:
        self.began.set()
        assert self.goes_on.wait(PATIENT_S)
        self.models.append(round_id)


def test_the_run_does_not_end_while_the_last_model_is_being_shown() -> None:
    async def main() -> None:
        held, names = Held(), SimpleNamespace(is_complete=lambda welcome: True, state=lambda model, personal: {})
        observer = ClientObserver([held], [], names, asyncio.Event())  # type: ignore[arg-type]
        showing = asyncio.create_task(observer.show_models())
        observer.queue_model(ArrivedModel(3, torch.zeros(2), b"", SimpleNamespace()))  # type: ignore[arg-type]
        assert await asyncio.to_thread(held.began.wait, PATIENT_S)

        ending = asyncio.create_task(observer.show_newest())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not ending.done()
        held.goes_on.set()
        async with asyncio.timeout(PATIENT_S):
            await ending
        assert held.models == [3], "once"

        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
        observer.close()

    asyncio.run(main())
