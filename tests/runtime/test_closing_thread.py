"""Threads that close things, in a running program and while its interpreter ends."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from dds_domains import new_domain

from gradbus.runtime import closing_thread
from gradbus.runtime.closing_thread import ClosingThread


def test_a_function_runs_on_a_thread_that_is_waited_for() -> None:
    go_on, threads = threading.Event(), []

    def work() -> None:
        go_on.wait(10.0)
        threads.append(threading.current_thread().name)

    thread = ClosingThread(work, "gradbus-test")
    thread.start()
    assert thread.is_running()
    thread.join(0.0)
    assert threads == []
    go_on.set()
    thread.join(10.0)
    assert (threads, thread.is_running()) == (["gradbus-test"], False)


def test_a_thread_starts_once() -> None:
    calls: list[int] = []
    thread = ClosingThread(lambda: calls.append(1), "gradbus-test")
    thread.start()
    with pytest.raises(RuntimeError, match="started once"):
        thread.start()
    thread.join(10.0)
    assert calls == [1]


def test_a_thread_that_nothing_starts_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> bool:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    thread = ClosingThread(lambda: None, "gradbus-test")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(closing_thread, "_start_by_the_system", lambda run: False)
    with pytest.raises(RuntimeError, match="at interpreter shutdown"):
        thread.start()
    thread.join()
    assert not thread.is_running()


# Beside another thread, as at the end of a program, and after all others have ended, as in a function of atexit.
ENDING = """
import atexit, threading
from gradbus.runtime.closing_thread import ClosingThread

def close(when):
    threads = [ClosingThread(lambda: done.append(threading.get_ident()), "late") for _ in range(3)]
    done = []
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10.0)
    print(when, len(done), threading.get_ident() in done, any(thread.is_running() for thread in threads), flush=True)

def wait_and_close():
    threading.main_thread().join()
    close("beside")

atexit.register(close, "atexit")
threading.Thread(target=wait_and_close).start()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no POSIX threads")
def test_threads_start_while_the_interpreter_ends() -> None:
    done = subprocess.run([sys.executable, "-c", ENDING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("beside 3 False False\natexit 3 False False\n", "", 0)


BUS = """
import asyncio, sys, threading, gradbus
from gradbus.runtime.wire.messages import ModelBlob

opened = threading.Event()

async def main():
    async with gradbus.connect(job="closes-late", domain=DOMAIN, load_actors=False) as bus:
        with bus.subscribe(ModelBlob):
            opened.set()
            threading.main_thread().join()
    print("closed", flush=True)

loop = asyncio.new_event_loop()  # whose executor is not ended: asyncio starts a thread for that
threading.Thread(target=lambda: loop.run_until_complete(main())).start()
opened.wait()
"""


def test_a_bus_can_be_closed_while_the_interpreter_ends() -> None:
    program = BUS.replace("DOMAIN", str(new_domain()))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr, done.returncode) == ("closed\n", "", 0)
