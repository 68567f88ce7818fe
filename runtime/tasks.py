"""Small helpers around asyncio's tasks and their groups."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from types import TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_ASYNCIO_EXIT = asyncio.TaskGroup.__aexit__.__code__


class TaskGroup(asyncio.TaskGroup):
    """A task group of asyncio that leaves no reference cycle when it is cancelled or raises.

    In Python 3.11 and the first releases of 3.12 and 3.13, the frame of ``asyncio.TaskGroup.__aexit__`` holds the error
    that it raises, whose traceback holds the frame. With it the traceback holds the frames of all callers, and so their
    local variables: models, and payloads in shared memory, until the garbage collector runs.
    """

    async def __aexit__(
        self, et: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> None:
        try:
            await super().__aexit__(et, exc, tb)
        except BaseException as error:
            error.__traceback__ = _without_exit(error.__traceback__)
            raise
        finally:
            del et, exc, tb  # this frame is in the traceback, too


def _without_exit(traceback: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of asyncio's ``__aexit__``."""
    kept: list[TracebackType] = []
    while traceback is not None:
        if traceback.tb_frame.f_code is not _ASYNCIO_EXIT:
            kept.append(traceback)
        traceback = traceback.tb_next
    following = None
    for one in reversed(kept):
        following = TracebackType(following, one.tb_frame, one.tb_lasti, one.tb_lineno)
    return following


async def items_of(
    serve: Callable[[Callable[[T], object]], Coroutine[Any, Any, None]], *, name: str, most: int = 0
) -> AsyncGenerator[T, None]:
    """Yield what a coroutine gives to the function that it is called with, as it comes. It runs as a task of this name,
    and is cancelled when nobody takes them any more. Of more than ``most`` items that wait the oldest are dropped; 0:
    the queue has no bound, as ``serve`` has one.

    Raises:
        What ``serve`` raises, without groups around a single error.
    """
    items: asyncio.Queue[T | None] = asyncio.Queue()

    def put(item: T | None) -> None:
        if most and items.qsize() >= most:
            items.get_nowait()
        items.put_nowait(item)

    running = asyncio.create_task(serve(put), name=name)
    running.add_done_callback(lambda _: put(None))
    try:
        while (item := await items.get()) is not None:
            yield item
        try:
            await running
        except BaseExceptionGroup as group:
            raise single_error(group) from None
    finally:
        await end(running)


async def end(task: asyncio.Task[Any]) -> None:
    """Cancel a task, if it still runs, and wait until it has ended. What it has raised is not raised here: whoever
    waits for the task gets that."""
    if not task.done():
        task.cancel()
        await asyncio.wait([task])  # and not "await task", which would absorb a cancellation of the task that waits
    if not task.cancelled():
        task.exception()  # else asyncio logs an error that nobody has asked for


def single_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error inside nested groups, where there is only one, maybe said more than once: it is what the caller
    can act on."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and (len(error.exceptions) == 1 or len(_leaves(error)) == 1):
        error = error.exceptions[0]
    return error


def _leaves(error: BaseException) -> set[tuple[type[BaseException], str]]:
    """The different errors in it."""
    if not isinstance(error, BaseExceptionGroup):
        return {(type(error), str(error))}
    return set().union(*map(_leaves, error.exceptions))
