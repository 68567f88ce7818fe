"""The exit codes of every command.

| code | meaning | what to do |
|---|---|---|
| 0 | all went well | |
| 1 | something unexpected; its traceback is on stderr | report it |
| 2 | a setting, an option or a configuration file is wrong | correct what the line names |
| 3 | the data set is not there and cannot be fetched | name its folder with ``--data-root`` or ``GRADBUS_DATA`` |
| 4 | clients, ranks, or the controller, did not come or went away | start them; ``gradbus doctor`` |
| 5 | a round had too few updates, too often | start more clients and continue the run |
| 6 | a checkpoint or the state directory cannot be used | as the line says |
| 7 | the controller refused this client, or the job has one already | as the line says: another id, model or job |
| 8 | the data bus cannot be used | ``gradbus doctor`` |
| 9 | a rank of a data-parallel run was lost, or fell silent | see its own log; start all ranks again to continue |
| 10 | the replicas of a data-parallel run are not equal any more | as the line says |
| 11 | the ranks do not ask for the same, so they cannot work together | give all the same program and settings |
| 12 | the history of a run breaks an invariant (``gradbus check``) | report it, with the run directory |
| 13 | the model, the data or the training code that was configured raised an error | mend it where the line says |
| 14 | a package that gradbus needs is missing or cannot be loaded | install it, as the line says |
| 15 | training came to NaN or infinity | as the line says: a smaller learning rate, clipping, other data |
| 130, 143 | stopped by Ctrl-C (or the terminal's end: 129), by SIGTERM | |
"""

from __future__ import annotations

from enum import IntEnum, unique

from gradbus.runtime.errors import (
    BarrierTimeout,
    BusError,
    CheckpointError,
    CollectiveError,
    CollectiveTimeout,
    ConfigError,
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
    """See the table above."""

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


class NoData(GradbusError):
    """A data set is neither on disk nor to be fetched from the network."""


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
