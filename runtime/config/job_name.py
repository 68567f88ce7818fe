"""The default name of a job, which two users of a machine do not share."""

from __future__ import annotations

import os
import re
from functools import cache

USER = "{user}"  # in a name that a configuration gives
_MAX_CHARS = 32
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


@cache
def user_name() -> str:
    """Return the user of this process, from the system: anybody can set variables of the environment."""
    try:
        import pwd  # not on every platform

        name = pwd.getpwuid(os.geteuid()).pw_name
    except (ImportError, KeyError):  # a container may run as a number that has no name
        name = str(os.geteuid()) if hasattr(os, "geteuid") else "user"
    return _NOT_IN_NAMES.sub("-", name)[:_MAX_CHARS]


def default_job() -> str:
    """Return the name of a job that the settings do not name."""
    return f"default-{user_name()}"


def with_user(job: str) -> str:
    """Put the user's name in the place of ``{user}``, as in the configurations of this package."""
    return job.replace(USER, user_name())
