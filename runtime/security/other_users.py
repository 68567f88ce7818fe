"""Whether the machine has other users: who could send to a bus on ``lo`` that nothing protects.

Others are people: accounts of the password database that can log in and have the ids of people, other than this
process's own; and whoever runs a process here with such an id, as directories (LDAP) need not list their accounts.
Accounts of services do not count: every machine has some, so that the warning would say nothing. What shares the
network of this machine from another PID namespace, a container with the host's network, cannot be seen from here.
"""

from __future__ import annotations

import contextlib
import os
import pwd
from pathlib import Path

_PEOPLE = range(1000, 60_001)  # as in Debian, Fedora and most others: UID_MIN and UID_MAX of /etc/login.defs
_NO_SHELLS = ("nologin", "false")
_MOST = 5  # that are named


def other_users() -> list[str]:
    """Names, or numbers where there is no name, of some of them; empty: this user is alone."""
    own = os.geteuid()
    found: dict[int, str] = {}
    for account in pwd.getpwall():
        if account.pw_uid in _PEOPLE and not account.pw_shell.endswith(_NO_SHELLS):
            found[account.pw_uid] = account.pw_name
    with contextlib.suppress(OSError):
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):  # it has ended
                    user = entry.stat().st_uid
                    if user in _PEOPLE:
                        found.setdefault(user, str(user))
    return [name for user, name in sorted(found.items()) if user != own][:_MOST]
