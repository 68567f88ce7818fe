"""A bus whose peers have host names opens and closes whatever the name server does."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest
from bus_helpers import Run
from patience import PATIENT_S
from structlog.testing import capture_logs

import gradbus
from gradbus.runtime.security import Security

OPEN = Security(level="none", insecure=True)  # on lo: the name resolves to nothing but this machine


def test_a_silent_name_server_holds_up_neither_the_loop_nor_the_opening_nor_the_end_of_a_bus(
    run: Run, place: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    threads: list[threading.Thread] = []

    def silent(name: str, port: None, family: int, kind: int) -> list[Any]:
        threads.append(threading.current_thread())
        assert let_go.wait(4 * PATIENT_S)
        return [(family, kind, 17, "", ("127.0.0.1", 0))]

    async def main() -> None:
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticking = asyncio.create_task(tick())
        async with gradbus.connect(**place, peers=["127.0.0.1", "silent.invalid"], security=OPEN) as bus:
            assert ticks >= 5  # of a second's worth: it waits so long for addresses
            assert bus.reach.hint().startswith(
                "No address yet for silent.invalid (no answer yet) of bus.peers: check DNS"
            )
            assert bus.reach.advice().startswith("No address yet for silent.invalid (no answer yet)")
        ticking.cancel()

    monkeypatch.setattr(socket, "getaddrinfo", silent)
    try:
        with capture_logs() as logs:
            run(main)
        assert not let_go.is_set()
        assert len(threads) == 1
        assert [line["reason"] for line in logs if line["event"] == "peer not resolved"] == ["no answer yet"]
    finally:
        let_go.set()
        for thread in threads:
            thread.join(PATIENT_S)
