"""How long callbacks are waited for once the run has ended."""

from __future__ import annotations

import asyncio
import threading

import pytest
from patience import PATIENT_S, eventually

from gradbus.runtime.callbacks import END_S, Callbacks, CallbackWait
from gradbus.runtime.errors import CallbackTimeout


class Gate:
    """Returns from ``on_end`` once it is opened."""

    def __init__(self) -> None:
        self.is_begun, self.opened = threading.Event(), threading.Event()

    def on_end(self, summary: object) -> None:
        self.is_begun.set()
        assert self.opened.wait(PATIENT_S)


def test_each_callback_has_its_own_time_after_the_end_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    gates = [Gate() for _ in range(3)]
    skipped_s = 0.0

    async def main() -> None:
        nonlocal skipped_s
        loop = asyncio.get_running_loop()
        clock = loop.time
        monkeypatch.setattr(loop, "time", lambda: clock() + skipped_s)
        callbacks = Callbacks("client", gates, [])
        wait = CallbackWait(callbacks)
        wait.run_has_ended()
        waiting = asyncio.create_task(wait.wait(asyncio.to_thread(callbacks.call, "on_end", None)))
        for gate in gates:
            await eventually(gate.is_begun.is_set)
            await asyncio.sleep(0)  # what its beginning has brought to the loop is done
            skipped_s += 0.8 * END_S
            for _ in range(3):  # timers that are due, the cancellation, and its end
                await asyncio.sleep(0)
            assert not waiting.done()
            if gate is not gates[-1]:
                gate.opened.set()
        skipped_s += 0.8 * END_S
        with pytest.raises(CallbackTimeout, match="Gate: on_end has not returned within 300 s, although the run"):
            await waiting
        gates[-1].opened.set()

    try:
        asyncio.run(main())
    finally:
        for gate in gates:
            gate.opened.set()
