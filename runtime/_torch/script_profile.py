"""Where the time of a step goes, for a script on backend "dds".

    with gradbus.torch.profile() as p:
        for inputs, targets in loader:
            ...
            optimizer.step()
    print(p.table())

The profile is that of workers (:mod:`gradbus.runtime.profiling.profile`), with the same files. A step ends with the
step of an optimizer. The times are those of the thread that trains; what other threads do meanwhile, exchanging and
compressing, is counted beside them.

For the time of the block ``torch.autograd.backward`` is another function, as torch has no hook for its end.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch.nn.modules import module as modules
from torch.optim import optimizer as optimizers

from gradbus.runtime.profiling.profile import Profile, Span, StepProfile
from gradbus.runtime.profiling.summary import ProfileSummary
from gradbus.runtime.profiling.table import text_table
from gradbus.torch.functions import current
from gradbus.torch.observed import observed
from gradbus.torch.untraced import untraced

WINDOW_STEPS = 10


class profile:  # noqa: N801 - as torch.profiler.profile
    """Measure the steps of this rank inside a ``with`` block, on the thread that enters it."""

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        window_steps: int = WINDOW_STEPS,
    ) -> None:
        """Choose what is measured.

        Args:
            folder: for ``profile-rank-R.jsonl``, with a line for each step and each window of them, and
                ``trace-rank-R.json``; ``gradbus report FOLDER`` draws them. None: nothing is written.
            optimizer: whose step ends a step, where there are several. None: that of each of them does.
            window_steps: number of steps whose means make a point of the curves.
        """
        self._folder = None if folder is None else Path(folder)
        self._optimizer = optimizer
        self._window_steps = window_steps
        self._profile: Profile | None = None
        self._number = 0
        self._step: StepProfile | None = None
        self._spans: list[Span] = []
        self._depth = {"forward": 0, "apply": 0}
        self._stepping: FrameType | None = None  # the call of step() that the span "apply" is of
        self._in_backward = False
        self._submitted_s = 0.0
        self._thread = 0
        self._undo = contextlib.ExitStack()

    # Results

    def table(self) -> str:
        """Return the parts of a step of this rank as text: means, longest and shares."""
        return text_table(self.summary())

    def summary(self) -> ProfileSummary:
        """Return the same as numbers. The step that is under way is not among them.

        Raises:
            RuntimeError: no step has begun.
        """
        return self.profile.summary()

    @property
    def profile(self) -> Profile:
        """Return what is measured, with the trace. Raises RuntimeError: no step has begun."""
        if self._profile is None:
            raise RuntimeError("profile: nothing is measured yet: write 'with gradbus.torch.profile(...) as p:'")
        return self._profile

    # The block

    def __enter__(self) -> Self:
        """Begin the first step.

        Raises:
            RuntimeError: there is no process group of this backend; or another profile is under way.
        """
        if observed.observer is not None:
            raise RuntimeError("profile: another one is under way in this process: end it first")
        group, folder = current().group, self._folder
        self._profile = Profile(
            group.rank,
            self._window_steps,
            None if folder is None else folder / f"profile-rank-{group.rank}.jsonl",
            jsonl_steps=True,
            traffic=group.traffic,
        )
        self._thread = threading.get_ident()
        observed.observer = self
        self._undo.callback(setattr, observed, "observer", None)
        backward = torch.autograd.backward
        torch.autograd.backward = self._measured(backward)
        self._undo.callback(setattr, torch.autograd, "backward", backward)
        for handle in (
            modules.register_module_forward_pre_hook(self._before_forward),
            modules.register_module_forward_hook(self._after_forward, always_call=True),
            optimizers.register_optimizer_step_pre_hook(self._before_apply),
            optimizers.register_optimizer_step_post_hook(self._after_apply),
        ):
            self._undo.callback(handle.remove)
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._undo.close()
        self._drop_spans()
        self._thread = 0  # whoever has kept our torch.autograd.backward measures nothing more
        if self._step is not None:
            if kind is None:
                self._step.cancel()
            else:
                self._step.__exit__(kind, error, tb)
            self._step = None
        self.profile.close()
        if self._folder is not None:
            self.profile.write_trace(self._folder / f"trace-rank-{self.profile.rank}.json")

    def _begin(self) -> None:
        self._step = self.profile.step(self._number)
        self._step.__enter__()
        self._number += 1

    def step(self) -> None:
        """End a step, where no optimizer of torch does: it is the script's own that steps."""
        if self._step is not None:
            self._step.__exit__(None, None, None)
            self._begin()

    # Spans of the thread that trains

    @property
    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def _open(self, name: str) -> None:
        """Begin the outermost of nested spans of a name."""
        if self._is_here:
            self._depth[name] += 1
            if self._depth[name] == 1:
                span = self.profile.span(name)
                span.__enter__()
                self._spans.append(span)

    def _close(self, name: str) -> bool:
        """End it. Returns whether it was the outermost."""
        if not self._is_here or not self._depth[name]:
            return False
        self._depth[name] -= 1
        if self._depth[name]:
            return False
        self._spans.pop().__exit__(None, None, None)
        return True

    def _drop_spans(self) -> None:
        """End those whose end was not seen."""
        while self._spans:
            self._spans.pop().cancel()
        self._depth = dict.fromkeys(self._depth, 0)
        self._stepping = None

    # A module that torch.compile takes in has no parts: its hooks would break the graph. The call around it counts.
    # A compiled step of an optimizer ends a step like any other one, so its graph is broken here.

    def _before_forward(self, module: Any, inputs: Any) -> None:
        if not torch.compiler.is_compiling():
            self._open("forward")

    def _after_forward(self, module: Any, inputs: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._close("forward")

    @untraced
    def _before_apply(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if not self._is_here:
            return
        # torch has no hook for a step that fails. If this one is not inside the one before, that one has failed.
        if self._stepping is not None and not _is_running(self._stepping):
            self._drop_spans()
        self._stepping = self._stepping or _caller()
        self._open("apply")

    @untraced
    def _after_apply(self, optimizer: Any, arguments: Any, options: Any) -> None:
        if not self._close("apply"):
            return
        self._stepping = None
        if self._optimizer in (None, optimizer):
            self.step()

    def _measured(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*arguments: Any, **options: Any) -> Any:
            if not self._is_here or self._in_backward:
                return backward(*arguments, **options)
            self._in_backward, self._submitted_s = True, 0.0
            try:
                with self.profile.span("backward"):
                    result = backward(*arguments, **options)
                    self._note_wait()
            finally:
                self._in_backward = False
            return result

        return measured

    def _note_wait(self) -> None:
        """DistributedDataParallel waits at the end of the backward pass, in C++: from the last bucket's start on."""
        if self._submitted_s:
            self.profile.add_inner_span("wait", self._submitted_s, time.perf_counter())

    # As an observer

    def submitted(self) -> None:
        """Note when the last bucket of a backward pass was handed over."""
        if self._is_here and self._in_backward:
            self._submitted_s = time.perf_counter()

    def exchanged(self, what: str, started_s: float, ended_s: float) -> None:
        """Note a collective, for the trace, and the time that collectives took, beside the step."""
        self.profile.add_span(what, started_s, ended_s)
        self.profile.count("exchange_ms", 1000 * (ended_s - started_s))

    def computed(self, took_s: float) -> None:
        """Note the time that an algorithm has computed, beside the step."""
        self.profile.count("compression_ms", 1000 * took_s)

    def waiting(self) -> contextlib.AbstractContextManager[Any]:
        """Measure a wait of the thread that trains."""
        is_counted = self._is_here and not (self._in_backward and self._submitted_s)
        return self.profile.span("wait") if is_counted else contextlib.nullcontext()


def _caller() -> FrameType | None:
    """Return the frame that has called the function that calls this; None: this Python has no frames."""
    here = inspect.currentframe()
    try:
        return None if here is None or here.f_back is None else here.f_back.f_back
    finally:
        del here  # a frame that names itself keeps the tensors of all its callers until the garbage collector comes


def _is_running(frame: FrameType) -> bool:
    """Return whether a call is under way on this thread, around this one."""
    caller = _caller()
    while caller is not None and caller is not frame:
        caller = caller.f_back
    return caller is not None
