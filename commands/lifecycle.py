"""How a command starts, is stopped, and ends: signals, event loop, errors, exit code.

The first Ctrl-C (SIGTERM, SIGHUP) cancels the command, which leaves the bus gracefully, or calls what the command ends
by; the second exits at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any, NoReturn, TypeVar

from gradbus.commands.choices import LoopName
from gradbus.commands.exit_codes import ExitCode, exit_code_of
from gradbus.runtime.errors import CallbackTimeout, GradbusError
from gradbus.runtime.needs import explain
from gradbus.runtime.plain_text import plain_line, plain_text
from gradbus.runtime.user_errors import readable_traceback, user_error

T = TypeVar("T")

stopping = threading.Event()
"""Set when this process shall stop: a computation in a thread may poll it."""

abandoned = threading.Event()
"""Set when a thread is inside a call that nothing waits for any more: the process ends without it."""

before_abort: list[Callable[[], None]] = []
"""Called even when the second Ctrl-C ends the process at once: short, and never waiting."""

if_stopped: list[Callable[[], str]] = []
"""Return a sentence for the user each, in case that a signal stops the command: how to go on."""

# As Python has it, also where the start of a command has put it off: a cycle of objects may hold a large message.
_THRESHOLDS = (700, 10, 10)

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "the end of its terminal"}


class Interrupted(Exception):
    """A signal has stopped the command."""

    def __init__(self, signum: signal.Signals) -> None:
        super().__init__(f"stopped by {_NAMES[signum]}")
        self.signum = signum


def run_loop(
    main: Callable[[], Coroutine[Any, Any, T]], loop: LoopName = "uvloop", *, stop: Callable[[], None] | None = None
) -> T:
    """Run ``main()`` on an event loop of its own.

    Args:
        stop: what the first signal calls, on the loop, instead of cancelling ``main``, which then ends by itself.

    Raises:
        Interrupted: a signal stopped it, and there is no ``stop``. Else as ``main``.
    """
    # A quarter of a million objects of modules, torch's above all, stay until the end. Whenever the garbage collector
    # walks over them, the loop and all threads stand still for 0.1 to 0.2 s.
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
    try:
        with asyncio.Runner(loop_factory=_loop_factory(loop)) as runner:
            return runner.run(_supervise(main, stop))
    finally:
        signal.signal(signal.SIGINT, _leave_at_once)


def _loop_factory(loop: LoopName) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if loop == "uvloop":
        try:
            import uvloop  # not on every platform
        except ImportError:
            return None
        return uvloop.new_event_loop
    return None


async def _supervise(main: Callable[[], Coroutine[Any, Any, T]], stop: Callable[[], None] | None) -> T:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    received: list[signal.Signals] = []

    def on_signal(signum: signal.Signals) -> None:
        if received:
            _abort(signum)
        received.append(signum)
        if stop is not None:
            stop()
            return
        task.cancel()
        # A moment later, so that the cancellation has reached the task that waits for the computation that this ends.
        loop.call_later(0.05, stopping.set)

    # nohup wants that the end of the terminal ends nothing.
    wanted = [signum for signum in _SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    for signum in wanted:
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        return await main()
    except (asyncio.CancelledError, Exception):
        if received and stop is None:
            raise Interrupted(received[0]) from None
        raise
    finally:
        for signum in wanted:
            loop.remove_signal_handler(signum)


async def off_the_loop(function: Callable[[], object], name: str) -> None:
    """Run it in a thread. Cancelled, this returns at once and leaves the thread to itself: loading is not undone."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=f"gradbus-{name}")
    try:
        await asyncio.get_running_loop().run_in_executor(executor, function)
    finally:
        executor.shutdown(wait=False)


def _abort(signum: int) -> NoReturn:
    for action in before_abort:
        action()
    os._exit(128 + signum)


def _leave_at_once(signum: int, _: FrameType | None) -> NoReturn:
    say(f"gradbus: stopped by {_NAMES[signal.Signals(signum)]}")
    _abort(signum)


def say(text: str) -> None:
    """One line on stderr, whatever the text."""
    print(plain_line(" ".join(text.split())), file=sys.stderr, flush=True)


def guard(name: str, action: Callable[[], int | None], *, full_traceback: bool = False) -> int:
    """Run a command and turn the way it ended into an exit code, and one line on stderr unless it ended well.

    An exception of the user's own code, or an unexpected one, has its traceback before that line: of the user's
    code only the lines that are theirs, where there are any.

    Args:
        name: of the command, for that line.
        action: returns the exit code of its own end; None: 0.
        full_traceback: leave no line of it out.
    """
    code = _guarded(name, action, full_traceback=full_traceback)
    if abandoned.is_set():  # the interpreter would wait for the thread
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _guarded(name: str, action: Callable[[], int | None], *, full_traceback: bool) -> int:
    before = signal.signal(signal.SIGINT, _leave_at_once)  # until the loop runs there is nothing to end gracefully
    if_stopped.clear()
    try:
        return action() or ExitCode.OK
    except Interrupted as stop:
        say(f"gradbus {name}: " + ". ".join([str(stop), *(sentence() for sentence in if_stopped)]))
        sys.stdout.flush()
        os._exit(128 + stop.signum)  # a thread that still computes cannot be stopped: do not wait for it
    except GradbusError as error:
        if isinstance(error, CallbackTimeout):
            abandoned.set()
        say(f"gradbus {name}: {error}")
        return exit_code_of(error)
    except Exception as error:
        if missing := explain(error):
            say(f"gradbus {name}: {missing}")
            return ExitCode.PACKAGE
        what = user_error(error)
        print(plain_text(readable_traceback(error, full=full_traceback)), end="", file=sys.stderr)
        if not what.is_own:
            say(f"gradbus {name}: unexpected error, {what}. Please report it, with the traceback above")
            return ExitCode.UNEXPECTED
        more = "" if full_traceback else "; --traceback shows also the lines of libraries"
        say(f"gradbus {name}: {what}. Mend it there and start again{more}")
        return ExitCode.OWN_CODE
    finally:
        signal.signal(signal.SIGINT, before)
