"""The exit codes of every command; docs/operations.md has a table of their meaning, and of what to do."""

from __future__ import annotations

from enum import IntEnum, unique

from gradbus.runtime.errors import (
    BarrierTimeout,
    BusError,
    CheckpointError,
    CollectiveError,
    CollectiveTimeout,
    ConfigError,
    ControllerReplaced,
    GradbusError,
    JobInUse,
    JoinRefused,
    PeerLost,
    ReplicasDiverged,
    RoundTimeout,
    TrainingDiverged,
    TrainingFailed,
)


@unique
class ExitCode(IntEnum):
    """The exit code of a command, unless a signal has stopped it: then 128 + its number."""

    OK = 0
    UNEXPECTED = 1
    CONFIG = 2
    NO_DATA = 3
    NOBODY_CAME = 4
    TOO_FEW_UPDATES = 5
    CHECKPOINT = 6
    REFUSED = 7
    BUS = 8
    RANK_LOST = 9
    DIVERGED = 10
    RANKS_DISAGREE = 11
    HISTORY = 12
    OWN_CODE = 13
    PACKAGE = 14
    NOT_FINITE = 15
    REPLACED = 16


RESTART_CANNOT_HELP = (ExitCode.CONFIG, ExitCode.REFUSED, ExitCode.PACKAGE, ExitCode.REPLACED)
"""The codes after which the same command fails again, or shall not run again, until a person has changed something."""


class NoData(GradbusError):
    """A data set is neither on disk nor available in the network."""


class NoJob(GradbusError):
    """No process of a job has answered."""


class ClientsGone(GradbusError):
    """All client processes have ended before the run has."""


_CODES: dict[type[GradbusError], ExitCode] = {
    ConfigError: ExitCode.CONFIG,
    NoData: ExitCode.NO_DATA,
    BarrierTimeout: ExitCode.NOBODY_CAME,
    ClientsGone: ExitCode.NOBODY_CAME,
    NoJob: ExitCode.NOBODY_CAME,
    TrainingFailed: ExitCode.OWN_CODE,
    RoundTimeout: ExitCode.TOO_FEW_UPDATES,
    CheckpointError: ExitCode.CHECKPOINT,
    JoinRefused: ExitCode.REFUSED,
    JobInUse: ExitCode.REFUSED,
    ControllerReplaced: ExitCode.REPLACED,
    BusError: ExitCode.BUS,
    PeerLost: ExitCode.RANK_LOST,
    CollectiveTimeout: ExitCode.RANK_LOST,
    ReplicasDiverged: ExitCode.DIVERGED,
    CollectiveError: ExitCode.RANKS_DISAGREE,
    TrainingDiverged: ExitCode.NOT_FINITE,
}


def exit_code_of(error: GradbusError) -> ExitCode:
    """The code of the nearest class in the table; UNEXPECTED for one that is not there."""
    return next((_CODES[kind] for kind in type(error).__mro__ if kind in _CODES), ExitCode.UNEXPECTED)
