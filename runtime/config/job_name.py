"""The name of a job that was given none: one that two users of a machine do not share."""

from __future__ import annotations

import os
import re
from functools import cache

USER = "{user}"  # in a name that a configuration gives
_MAX_CHARS = 32
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@cache
def user_name() -> str:
    """Who runs this process, as the system knows it: variables of the environment can be anybody's."""
    try:
        import pwd  # not on every platform

        name = pwd.getpwuid(os.geteuid()).pw_name
    except (ImportError, KeyError):  # a container may run as a number that has no name
        name = str(os.geteuid()) if hasattr(os, "geteuid") else "user"
    return _NOT_IN_NAMES.sub("-", name)[:_MAX_CHARS]


def default_job() -> str:
    """The job of who names none."""
    return f"default-{user_name()}"


def with_user(job: str) -> str:
    """A name with ``{user}`` in it, as the configurations that come along have it."""
    return job.replace(USER, user_name())
