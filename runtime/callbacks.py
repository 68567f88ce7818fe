"""The user's own code at certain points of a run: objects with methods that the run calls by name.

A callback is any object with some of the methods of its kind of run; what they get and when they are called stands with
what calls them: :mod:`gradbus.actors.federated.controller.early_stop`,
:mod:`gradbus.actors.federated.client.client_observer` and :mod:`gradbus.actors.data_parallel.callbacks`. They may
return True, which ends the run, but for ``on_end``. What they return is True, False or None, of Python or numpy, or one
of these in a tensor; else the callback has failed.

While a run goes on it waits for a callback as long as that takes; a warning names one of a client or a controller that
takes long. Once the run has ended, each callback that does not return within :data:`END_S` is an error: see
:class:`CallbackWait`.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from gradbus.runtime.choices import import_object
from gradbus.runtime.errors import CallbackFailed, CallbackTimeout, ConfigError
from gradbus.runtime.logs import get_logger
from gradbus.runtime.nearest import nearest

T = TypeVar("T")

WARN_S = 60.0
"""After so long a warning names a callback that has not returned, and again each time that twice as long has passed."""
END_S = 300.0
"""So long each callback may take once the run has ended, from its own beginning on."""

log = get_logger("callbacks")

METHODS: Mapping[str, tuple[str, ...]] = {
    "federated": ("on_round", "on_update", "on_aggregate", "on_evaluation", "on_report", "on_end"),
    "parallel": ("on_step", "on_evaluation", "on_epoch", "on_end"),
    "client": ("on_round", "on_model", "on_report", "on_end"),
}
"""What is called, by the section of the settings that names callbacks."""

_PREFIX = "on_"
_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "on_round": ("round_id",),
    "on_update": ("update",),
    "on_model": ("round_id", "model"),
    "on_end": ("summary",),
}
"""With what a method is called; the others get a report."""


class Callbacks:
    """The callbacks of one process of a run.

    Attributes:
        newest: name and method of the one that was called last. is_running: whether it has not returned yet.
        on_begin: is called before each callback, on the same thread.
    """

    def __init__(self, section: str, given: Sequence[Any], named: Sequence[str]) -> None:
        """
        Args:
            section: of :data:`METHODS`.
            given: objects. named: classes or objects as ``package.module:Name``; classes are called without arguments.

        Raises:
            ConfigError: one cannot be imported or made, has none of the methods, or has one that nothing calls or that
                cannot be called.
        """
        if not isinstance(given, Iterable):
            raise ConfigError(
                f"callbacks: expected a list of objects, got one {type(given).__qualname__}: write callbacks=[...]"
            )
        self._all = [(f"{type(one).__module__}:{type(one).__qualname__}", one) for one in given]
        self._all += [(spec, _imported(spec, f"{section}.callbacks")) for spec in named]
        for name, one in self._all:
            _check(name, one, METHODS[section])
        self.newest = ("", "")
        self.is_running = False
        self.on_begin: Callable[[], object] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._all)

    def have(self, method: str) -> bool:
        """Return whether a callback has this method."""
        return any(callable(getattr(one, method, None)) for _, one in self._all)

    def call(self, method: str, *arguments: Any) -> list[str]:
        """Call this method of all that have it. Returns the names of those that want the run to end.

        Raises:
            CallbackFailed: one has raised an exception, or has returned something else than True, False or None.
        """
        ending = []
        for name, one in self._all:
            function = getattr(one, method, None)
            if not callable(function):
                continue
            self.newest, self.is_running = (name, method), True
            self.on_begin()
            try:
                if _wants_end(function(*arguments)) and method != "on_end":
                    ending.append(name)
            except Exception as error:
                raise CallbackFailed(name, method, error) from error
            finally:
                self.is_running = False
        return ending


class CallbackWait:
    """Waits, on the event loop, for what calls callbacks on another thread."""

    def __init__(self, callbacks: Callbacks) -> None:
        """Wait for these without a deadline, until :meth:`run_has_ended`."""
        self._callbacks = callbacks
        self._limits: set[asyncio.Timeout] = set()  # of what is waited for now
        self._loop: asyncio.AbstractEventLoop | None = None  # that waits
        self._has_ended = False
        callbacks.on_begin = self._callback_begins

    def run_has_ended(self) -> None:
        """From now on, each callback has :data:`END_S`."""
        if not self._has_ended:
            self._has_ended = True
            self._set_limits()

    def _callback_begins(self) -> None:
        """Give the next callback a time of its own. On the thread of the callbacks."""
        if self._has_ended and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits any longer
                self._loop.call_soon_threadsafe(self._set_limits)

    def _set_limits(self) -> None:
        for limit in self._limits:
            if not limit.expired():
                limit.reschedule(asyncio.get_running_loop().time() + END_S)

    async def wait(self, call: Coroutine[Any, Any, T]) -> T:
        """Return what ``call`` returns, which runs callbacks among other things.

        Raises:
            CallbackTimeout: the run has ended, and a callback has not returned for :data:`END_S` since then, or since
                it began. And what ``call`` raises.
        """
        self._loop = asyncio.get_running_loop()
        limit, reminder = asyncio.timeout(END_S if self._has_ended else None), _Reminder(self._warn)
        self._limits.add(limit)
        try:
            async with limit:
                return await call
        except TimeoutError:
            if not limit.expired():
                raise
            raise CallbackTimeout(*self._callbacks.newest, END_S) from None
        finally:
            self._limits.discard(limit)
            reminder.cancel()

    def _warn(self, waited_s: float) -> None:
        name, method = self._callbacks.newest
        if self._callbacks.is_running:  # else what is waited for is other work, on the same thread
            effect = f"an error after {END_S:g} s, as the run has ended" if self._has_ended else "the run waits for it"
            log.warning("callback has not returned", callback=name, method=method, waited_s=waited_s, effect=effect)


class _Reminder:
    """Calls a function after :data:`WARN_S`, and again each time that twice as long has passed, until cancelled."""

    def __init__(self, remind: Callable[[float], None]) -> None:
        self._remind = remind
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(WARN_S, self._due, WARN_S)

    def _due(self, waited_s: float) -> None:
        self._remind(waited_s)
        self._timer = self._loop.call_later(waited_s, self._due, 2 * waited_s)

    def cancel(self) -> None:
        self._timer.cancel()


def _check(name: str, one: Any, methods: Sequence[str]) -> None:
    """Raises ConfigError: it is no callback of this kind of run. One object may serve both kinds."""
    known = {method for section in METHODS.values() for method in section}
    for other in dir(one):
        if other.startswith(_PREFIX) and other not in known and callable(inspect.getattr_static(one, other)):
            near = nearest(other, methods)
            hint = f" Did you mean {near}?" if near else ""
            raise ConfigError(
                f"callback {name}: nothing calls its method {other}.{hint} Called are {', '.join(methods)}; give what "
                f"is no callback a name without {_PREFIX} in front"
            )
    if not any(callable(getattr(one, method, None)) for method in methods):
        raise ConfigError(f"callback {name}: expected an object with some of {', '.join(methods)}")
    if inspect.isclass(one) and any(
        inspect.isfunction(inspect.getattr_static(one, method, None)) for method in methods
    ):
        raise ConfigError(f"callbacks: {one.__qualname__} is a class, expected an object: write {one.__qualname__}()")
    for method in methods:
        if callable(function := getattr(one, method, None)):
            _check_method(f"callback {name}: {method}", function, _ARGUMENTS.get(method, ("report",)))


def _check_method(what: str, function: Callable[..., Any], arguments: Sequence[str]) -> None:
    """Raises ConfigError: the method is asynchronous, or takes other arguments."""
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"{what} is an async function, expected a plain one: it is called on a thread. Write 'def', and give what "
            f"belongs on the event loop to it with loop.call_soon_threadsafe or asyncio.run_coroutine_threadsafe"
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions written in C have none
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ConfigError(f"{what} takes {signature}, and is called with ({', '.join(arguments)}): {error}") from None


def _wants_end(returned: Any) -> bool:
    """Raises TypeError: it is neither true, false nor None."""
    if isinstance(returned, Tensor) and returned.dtype == torch.bool and returned.ndim == 0:
        return bool(returned)
    if returned is None or isinstance(returned, bool | np.bool_):
        return bool(returned)
    raise TypeError(f"it returned a {type(returned).__name__}, expected True to end the run, else False or None")


def _imported(spec: str, key: str) -> Any:
    found = import_object(spec, key=key)
    if not inspect.isclass(found):
        return found
    try:
        return found()
    except Exception as error:
        raise ConfigError(f"{key} {spec!r}: {type(error).__name__}: {error}. It is made without arguments") from error
