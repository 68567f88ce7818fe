"""Mistakes in a program that Python lets pass, or tells of in words of its own, become a sentence that says what to do.

``with`` instead of ``async with``, a call that is not awaited, a misspelt keyword, an argument that is another thing.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import wraps
from types import MappingProxyType, ModuleType, TracebackType
from typing import Any, Generic, NoReturn, ParamSpec, TypeVar

from gradbus.runtime.errors import ConfigError
from gradbus.runtime.nearest import nearest

T = TypeVar("T")
P = ParamSpec("P")


class WrongKeyword(ConfigError, TypeError):
    """A function or a settings class has no such keyword; the text names the nearest one that it has."""


def explain_keyword(what: str, wrong: str, known: Iterable[str]) -> str:
    """The sentence about one wrong keyword of ``what``."""
    names = sorted(known)
    near = nearest(wrong, names)
    hint = f"did you mean {near!r}?" if near else f"it takes {', '.join(names)}"
    return f"{what} has no keyword {wrong!r}: {hint}"


def check_keywords(what: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raises WrongKeyword: one of these keywords of ``what`` is not known."""
    for name in given:
        if name not in known:
            raise WrongKeyword(explain_keyword(what, name, known))


class WrongArgument(ConfigError, TypeError):
    """An argument is another kind of thing than expected, such as a class in place of an object."""


def check_instance(call: str, argument: str, given: object, expected: type, advice: str) -> None:
    """Check an argument of a constructor.

    Args:
        call: how a program calls it, such as ``Client(bus, task, ...)``. argument: its name.
        given: its value. expected: the class of which it must be an instance.
        advice: what to do otherwise, a sentence without a full stop.

    Raises:
        WrongArgument: it is something else.
    """
    if not isinstance(given, expected):
        raise WrongArgument(
            f"{call}: {argument}: expected {_with_article(expected.__name__)}, got {described(given)}. {advice}"
        )


def check_task(
    call: str, given: object, methods: Sequence[str], protocol: str, *, unless: Mapping[str, str] = MappingProxyType({})
) -> None:
    """Check that the task of a constructor is an object with these methods, or a class that has them as static or class
    methods.

    Args:
        call: as of :func:`check_instance`. protocol: the class that describes a task, for the text.
        unless: by the name of a method, how a setting is set so that it is not called, such as ``eval_every to 0``.

    Raises:
        WrongArgument: it is a class of which an object is needed, or it lacks some of them.
    """
    if isinstance(given, type) and any(inspect.isfunction(inspect.getattr_static(given, one, None)) for one in methods):
        name = given.__name__
        raise WrongArgument(f"{call}: task: expected an object, got the class {name}. Write {name}(...)")
    if lacking := [name for name in methods if not callable(getattr(given, name, None))]:
        raise WrongArgument(
            f"{call}: task: expected an object with the methods {', '.join(methods)}, got {described(given)}, which "
            f"lacks {', '.join(lacking)}. Give a task, as {protocol} describes it, and keep the order of the arguments"
            + "".join(f"; or set {unless[name]}" for name in lacking if lacking == [name] and name in unless)
        )


def described(given: object) -> str:
    """Return what an argument is, in words for an error."""
    match given:
        case None:
            return "None"
        case type():
            return f"the class {given.__name__}"
        case ModuleType():
            return f"the module {given.__name__}"
        case str():
            return f"the text {given[:80]!r}"
        case Opening():
            return f"{given.call}(...), which has not been entered"
    if inspect.isroutine(given):
        return f"the function {getattr(given, '__name__', '')}"
    return _with_article(type(given).__name__)


def _with_article(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIOaeio' else 'a'} {name}"


class Opening(AbstractAsyncContextManager[T]):
    """Holds what is to be entered with ``async with``, and says so to whoever uses it otherwise."""

    def __init__(self, manager: AbstractAsyncContextManager[T], call: str, gives: str) -> None:
        self._manager = manager
        self.call = call
        self._do = f"write 'async with {call}(...) as {gives}:' in an async function, and use {gives} inside of it"

    async def __aenter__(self) -> T:
        return await self._manager.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._manager.__aexit__(kind, error, trace)

    def __enter__(self) -> NoReturn:
        raise TypeError(
            f"{self.call}(...) cannot be entered with 'with' alone: {self._do}; start that with asyncio.run"
        )

    def __exit__(self, *_: object) -> None:
        """Never reached: ``with`` looks for it before it enters."""

    def __await__(self) -> NoReturn:
        raise TypeError(f"{self.call}(...) is entered and not awaited: {self._do}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what Python itself and its tools look for
            raise AttributeError(name)
        raise AttributeError(f"{self.call}(...) has no {name!r}, for it has not been entered: {self._do}")


def opening(
    call: str, gives: str
) -> Callable[[Callable[P, AsyncIterator[T]]], Callable[P, AbstractAsyncContextManager[T]]]:
    """As ``contextlib.asynccontextmanager``, with sentences about what is done wrong with the function.

    Args:
        call: how a program calls it. gives: a name for what it gives.
    """

    def decorate(function: Callable[P, AsyncIterator[T]]) -> Callable[P, AbstractAsyncContextManager[T]]:
        make = asynccontextmanager(function)
        known = inspect.signature(function).parameters

        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[T]:
            check_keywords(f"{call}()", kwargs, known)
            return Opening(make(*args, **kwargs), call, gives)

        return wrapper

    return decorate


class _Call(Coroutine[Any, Any, T], Generic[T]):
    """A coroutine that says so when it goes without having been started."""

    def __init__(self, inner: Coroutine[Any, Any, T], call: str) -> None:
        self._inner = inner
        self._call = call
        self._started = False

    def send(self, value: Any) -> Any:
        self._started = True
        return self._inner.send(value)

    def throw(self, *error: Any) -> Any:
        self._started = True
        return self._inner.throw(*error)

    def close(self) -> None:
        self._started = True
        self._inner.close()

    def __await__(self) -> Any:
        self._started = True
        return self._inner.__await__()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)  # cr_frame and the like, for tools

    def __del__(self) -> None:
        if not self._started:
            self._inner.close()
            text = f"{self._call} was called and not awaited, so nothing has happened: write 'await {self._call}'"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def awaited(call: str) -> Callable[[Callable[P, Coroutine[Any, Any, T]]], Callable[P, Coroutine[Any, Any, T]]]:
    """For coroutine functions of which a forgotten ``await`` would leave a program standing there without a word.

    Args:
        call: how a program calls it, such as ``client.run()``.
    """

    def decorate(function: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, Coroutine[Any, Any, T]]:
        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, T]:
            return _Call(function(*args, **kwargs), call)

        return wrapper

    return decorate
