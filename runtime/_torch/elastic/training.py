"""Runs a training function, again in each new process group, until it has come to its end on all ranks."""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from gradbus.runtime.collectives.generations import LOST, NoGeneration, WaitedInVain
from gradbus.runtime.errors import ConfigError, GradbusError
from gradbus.runtime.launcher_environment import adopt_launcher
from gradbus.runtime.logs import get_logger
from gradbus.runtime.user_errors import user_error
from gradbus.torch.backend import first_errors
from gradbus.torch.elastic.launched import member_place
from gradbus.torch.elastic.membership import Departure, ElasticMembership, FixedRanks
from gradbus.torch.elastic.state import MembersChanged, TorchState
from gradbus.torch.functions import current, start_reduction

P = ParamSpec("P")
R = TypeVar("R")

NOTHING_TO_JOIN = 4
"""Exit code of a process that was to join a run and has found none in time: that of all commands for it."""
_SPACE, _VOTE = "elastic", "commit"

log = get_logger("elastic")

_meeting: ElasticMembership | FixedRanks | None = None


def generation() -> int:
    """Return the number of the generation of ranks that this process is in, from 1 on; 0: it is in none. A run whose
    ranks are fixed has one."""
    return 0 if _meeting is None else _meeting.number


def leave() -> None:
    """Have this process leave after the next commit, without a lost step: ``run`` ends it with exit code 0.

    On any thread, and in a signal handler. Raises RuntimeError: there is no elastic run, or its ranks are fixed.
    """
    if _meeting is None:
        raise RuntimeError("elastic.leave: no function of elastic.run is running in this process")
    _meeting.announce_leave()


def run(function: Callable[Concatenate[TorchState, P], R]) -> Callable[Concatenate[TorchState, P], R]:
    """Make a training function elastic.

        @gradbus.torch.elastic.run
        def train(state): ...

        train(state)

    The function is called once the process group is there and all ranks have the newest state, and called again when
    the members have changed. What belongs to a process group is made inside of it: DistributedDataParallel,
    ``with_algorithm``, groups. It returns on all ranks after the same commits; ``run`` destroys the process group.

    Members come and go under ``gradbus run --elastic MIN:MAX -- train.py``, and with the variables that it sets.
    Otherwise ranks are fixed, as the environment says: a rank that is lost ends the function with its error, and
    torchrun starts all of them again, which go on from the state's checkpoint.

    Raises:
        ConfigError: the process does not fit the members, or the environment does not fit together.
        RuntimeError: there is a process group already; or a rank made other commits than the others.
        WaitedInVain: there were too few members for too long.
        SystemExit: with code 0, as the run had ended before this process became a member, or it has left; with code 4
            (:data:`NOTHING_TO_JOIN`), as a process that joins has found no run.
        Whatever the function raises.
    """

    @functools.wraps(function)
    def elastic(state: TorchState, /, *arguments: P.args, **options: P.kwargs) -> R:
        global _meeting
        if not isinstance(state, TorchState):
            raise ConfigError(f"elastic.run: the first argument is a TorchState, got {type(state).__name__}")
        if _meeting is not None:
            raise RuntimeError("elastic.run: a function of elastic.run is running already in this process")
        _meeting = _make_meeting(state)
        try:
            state.begin(functools.partial(_vote, _meeting, state), lambda: _writes(_meeting), joins=_meeting.joins)
            return _generations(_meeting, state, lambda: function(state, *arguments, **options))
        except NoGeneration as over:
            log.warning("this process takes no part any more", reason=str(over))
            raise SystemExit(0) from None
        except WaitedInVain as error:
            if not _meeting.joins or _meeting.number:
                raise
            log.error("nothing to join", error=str(error), likely="the run has come to its end meanwhile")
            raise SystemExit(NOTHING_TO_JOIN) from None
        finally:
            state.end()
            _meeting.close()
            _meeting = None

    return elastic


def _writes(meeting: ElasticMembership | FixedRanks | None) -> bool:
    return meeting is not None and meeting.writes


def _make_meeting(state: TorchState) -> ElasticMembership | FixedRanks:
    adopt_launcher()
    place = member_place()
    if place is None:
        return FixedRanks(os.environ.get("LOCAL_RANK", "0") == "0")
    if dist.is_initialized():
        raise RuntimeError(
            "elastic.run makes the process group, anew for each generation: remove init_process_group() and "
            "gradbus.torch.init(), or call them in a run that is not elastic alone"
        )
    return ElasticMembership(place, state.layout)


def _generations(meeting: ElasticMembership | FixedRanks, state: TorchState, train: Callable[[], R]) -> R:
    """Call the function in one generation after the other. Returns what it returns in the last one."""
    attempt = _Attempt[R]()
    while (ended := _one_generation(meeting, state, train, attempt)) is None:
        attempt.is_first = False
        _drop_former()
    return ended[0]


class _Attempt(Generic[R]):
    """Holds what one generation leaves to the next one.

    Attributes:
        is_first: this is the first generation of this process.
        returned: what the function has returned, in a tuple, where a rank was lost in the vote on the end after that.
            A rank that has received all votes ends the run, which then is complete on this rank, too; if none has, the
            next generation begins with the last commit.
    """

    def __init__(self) -> None:
        self.is_first = True
        self.returned: tuple[R] | None = None


def _one_generation(
    meeting: ElasticMembership | FixedRanks, state: TorchState, train: Callable[[], R], attempt: _Attempt[R]
) -> tuple[R] | None:
    """Return the value of the function, alone in a tuple; None: there is another generation."""
    departure = Departure()
    before, attempt.returned = attempt.returned, None
    try:
        meeting.meet()
        if before is not None:  # the run has not ended on any other rank
            state.restore()
        if not attempt.is_first:
            state.reset()
        state.sync()
        log.info("generation", generation=meeting.number, world=dist.get_world_size(), commits=state.commits)
        value = train()
        _check_there()
        attempt.returned = (value,)
        _agree(meeting, state, is_done=True)
        departure = Departure(is_end=True)
        return (value,)
    except MembersChanged:
        state.restore()  # the function may have changed the state on its way out; a rank that joins has the commit
        return None
    except NoGeneration as over:
        # Not where this rank was cut off: a later generation has done the rest of the run again, without it.
        if before is not None and over.ended == meeting.number:
            log.info(
                "the run has ended", commits=state.commits, reason="all ranks had voted for it before one was lost"
            )
            return before
        raise
    except WaitedInVain:
        raise
    except (RuntimeError, *LOST) as error:
        lost = _lost(error)
        departure = Departure(lost or GradbusError(f"failed with {user_error(error)}"))
        if lost is None or not meeting.goes_on:
            raise
        log.warning("generation lost", generation=meeting.number, commits=state.commits, error=str(lost))
        if attempt.returned is None:
            state.restore()
        return None
    except BaseException as error:
        departure = Departure(GradbusError(f"failed with {user_error(error)}"))
        raise
    finally:
        meeting.part(departure)


def _check_there() -> None:
    if not dist.is_initialized():
        raise RuntimeError(
            "elastic.run destroys the process group itself, once all ranks have ended: remove "
            "destroy_process_group() from the function"
        )


def _lost(error: BaseException) -> Exception | None:
    """The error of gradbus that says that a rank is lost, if this one is its consequence."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, LOST):
            return cause
        cause = cause.__cause__
    # DistributedDataParallel and autograd hand on no more than the text, and an algorithm has a group of its own.
    return next((first for first in first_errors() if isinstance(first, LOST)), None)


def _drop_former() -> None:
    """Free what is left of the former process group: a DistributedDataParallel that lives on, in a cycle of references,
    would take the gradients of the next backward pass."""
    algorithm_hook = sys.modules.get("gradbus.torch.algorithm_hook")
    if algorithm_hook is not None:
        algorithm_hook.close_all()
    gc.collect()


# The vote of a commit


def _vote(meeting: ElasticMembership | FixedRanks, state: TorchState) -> bool:
    return meeting.goes_on and _agree(meeting, state, is_done=False)


def _agree(meeting: ElasticMembership | FixedRanks, state: TorchState, *, is_done: bool) -> bool:
    """Whether some rank wants the members to change. All ranks call this after the same commits.

    Raises:
        RuntimeError, on all ranks: they have made different numbers of commits, or some only have come to the end.
    """
    own = torch.tensor([meeting.change_is_wanted, state.commits, -state.commits, is_done, -int(is_done)])
    wanted, most, least, some_done, all_done = start_reduction(current(), own, _SPACE, _VOTE, "max").wait().tolist()
    if most != -least:
        raise RuntimeError(
            f"elastic: ranks have made {-least} to {most} commits, this one {state.commits}. All ranks call commit() "
            f"and check_host_updates() after the same steps: give them equally many batches, as ElasticSampler does"
        )
    if some_done != -all_done:
        ended = "has" if is_done else "has not"
        raise RuntimeError(
            f"elastic: the function has returned on some ranks, and goes on on others after {state.commits} commits; "
            f"this one {ended} ended. All ranks return after the same commits"
        )
    return bool(wanted)
