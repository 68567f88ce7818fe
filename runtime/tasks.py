"""Small helpers around asyncio's task groups."""

from __future__ import annotations


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
