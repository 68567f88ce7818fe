"""Small helpers around asyncio's task groups."""

from __future__ import annotations


def single_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error inside nested groups, where there is only one: it is what the caller can act on."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
