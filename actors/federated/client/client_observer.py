"""How the program around a client follows it: callbacks, reports, and each global model as it arrives.

A callback is any object with some of these methods. They are called one at a time, on a thread that does nothing else,
so ``on_model`` comes while the client trains. Those but the last may return True: then the client leaves the run.

    on_round(round_id: int)                        before the training of a round, which waits for it
    on_model(round_id: int, model: dict)           a global model has arrived: tensors by name, for load_state_dict
    on_report(report: ClientReport)                after each round that this client was asked for
    on_end(summary: ClientSummary)                 the run has ended well, and the last model was given

``on_model`` gets the newest model: one that is slower than the rounds misses those in between, and so does a client
that a model has not reached in time. The last one comes before ``on_end``.

A callback may take as long as it needs while the run goes on. Once that has ended, each has ``callbacks.END_S``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from torch import Tensor

from gradbus.actors.federated.model.named_model import ArrivedModel, NamedModel
from gradbus.runtime.callbacks import Callbacks, CallbackWait
from gradbus.runtime.compute import ComputeThread
from gradbus.runtime.wire.control import UploadRequest

CALLED_OFF = "called off"  # the round was over, or its controller gone, before the update was there
MAX_REPORTS = 1024  # that wait for whoever iterates over the rounds; then the oldest is dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientReport:
    """One round of a client.

    Attributes:
        round_id: of the controller's command.
        counted: whether its update counts. reason: why not; empty: it does.
        num_samples: that it was trained on, and ``loss``, ``metrics``, ``steps``, ``train_s`` as they were announced:
            of an update that was not made 0, None and none.
        bytes_up: payload of what was sent. seconds: from the command's arrival at the training to this report.
    """

    round_id: int
    counted: bool
    reason: str = ""
    num_samples: int = 0
    loss: float | None = None
    metrics: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    steps: int = 0
    train_s: float = 0.0
    bytes_up: int = 0
    seconds: float = 0.0

    @classmethod
    def of_update(cls, request: UploadRequest, reason: str, *, bytes_up: int, seconds: float) -> ClientReport:
        """Report an update that was sent. ``reason``: why it does not count; empty: it does."""
        return cls(
            round_id=request.round_id,
            counted=not reason,
            reason=reason,
            num_samples=request.num_samples,
            loss=request.loss if math.isfinite(request.loss) else None,
            metrics=MappingProxyType(dict(request.metrics)),
            steps=request.steps,
            train_s=request.train_s,
            bytes_up=bytes_up,
            seconds=seconds,
        )


@dataclass(frozen=True, slots=True)
class ClientSummary:
    """A client's part in a run.

    Attributes:
        rounds: in which its update counted. refused: updates that did not.
        bytes_up: payload of updates sent, those that did not count and repairs included, headers left out.
        train_s: seconds of training in all.
    """

    rounds: int
    refused: int
    bytes_up: int
    train_s: float


class ClientObserver:
    """Calls the callbacks of one client, and keeps its newest global model for them. For the event loop.

    Attributes:
        ending: why the client is to leave, as a callback has asked for it; empty: it goes on.
        newest: the newest global model; None: none has arrived.
        personal: tensors that this client keeps of its own, by name, as its newest update that counts has left them.
        models: names the tensors of models that have arrived.
    """

    def __init__(
        self,
        given: Sequence[Any],
        named: Sequence[str],
        models: NamedModel,
        changed: asyncio.Event,
        *,
        name: str = "client",
    ) -> None:
        """Follow nothing yet.

        Args:
            given, named: callbacks, as of :class:`~gradbus.runtime.callbacks.Callbacks`.
            models: names tensors. changed: is set when ``ending`` has changed.
            name: of the thread.

        Raises:
            ConfigError: a callback is none.
        """
        self._callbacks = Callbacks("client", given, named)
        self._wait = CallbackWait(self._callbacks)
        self.models = models
        self._changed = changed
        self._thread = ComputeThread(f"{name}-callbacks")
        self._copying = ComputeThread(f"{name}-state")  # a callback may be slow, and may itself wait for a state
        self._pending = asyncio.Event()  # a model has come that on_model has not had
        self._showing = asyncio.Lock()  # while on_model is called
        self._shown: ArrivedModel | None = None  # that it has had
        self._on_report: Callable[[ClientReport], object] = lambda report: None
        self.newest: ArrivedModel | None = None
        self.personal: Mapping[str, Tensor] = {}
        self.ending = ""

    @property
    def follows_models(self) -> bool:
        """Whether a callback takes models, so that this client needs each of them."""
        return self._callbacks.have("on_model")

    def report_to(self, on_report: Callable[[ClientReport], object]) -> None:
        """Give reports to this function, too."""
        self._on_report = on_report

    def queue_model(self, model: ArrivedModel) -> None:
        """Note a global model that has arrived."""
        if self.newest is None or self.newest.vector is not model.vector:
            self.newest = model
            self._pending.set()

    def keep_personal(self, tensors: Mapping[str, Tensor]) -> None:
        """Take the tensors that the client keeps of its own, by name."""
        self.personal = tensors

    def look_again(self) -> None:
        """Show the newest model, which was not complete before."""
        self._pending.set()

    def run_has_ended(self) -> None:
        """Take note that the run has ended: from now on callbacks have a deadline."""
        self._wait.run_has_ended()

    async def show_models(self) -> None:
        """Call ``on_model`` for models as they arrive, until cancelled. Raises CallbackFailed."""
        while self.follows_models:
            await self._pending.wait()
            await self.show_newest()
        await asyncio.get_running_loop().create_future()

    async def show_newest(self) -> None:
        """Call ``on_model`` for the newest model, unless it has had it. Afterwards it has. Raises CallbackFailed."""
        async with self._showing:  # whoever comes while a model is being shown has that call end first
            self._pending.clear()
            model = self.newest
            if model is None or model is self._shown or not self.follows_models:
                return
            if not self.models.is_complete(model.welcome):  # it comes again once it is
                return
            self._shown = model
            await self._call("on_model", lambda: (model.round_id, self.models.state(model, self.personal)))

    async def round_begins(self, round_id: int) -> None:
        """Call ``on_round``. Raises CallbackFailed."""
        await self._call("on_round", lambda: (round_id,))

    async def round_done(self, report: ClientReport) -> None:
        """Give a report to all that follow. Raises CallbackFailed."""
        self._on_report(report)
        await self._call("on_report", lambda: (report,))

    async def run_ended(self, summary: object) -> None:
        """Call ``on_end``. Raises CallbackFailed."""
        await self._call("on_end", lambda: (summary,))

    async def state_dict(self) -> dict[str, Any]:
        """Return the newest global model as tensors by name: copies on the CPU, made off the event loop.

        Raises:
            RuntimeError: none has arrived yet, or it is not complete.
        """
        model = self.newest
        if model is None:
            raise RuntimeError("no global model has arrived yet: await this after the client's first round has begun")
        if not self.models.is_complete(model.welcome):
            raise RuntimeError(
                "the model is not complete yet: its layout and frozen parameters come before the first round. Await "
                "this after that has begun"
            )
        return await self._copying.run_or_follow(lambda: self.models.state(model, self.personal))

    async def _call(self, method: str, make: Callable[[], tuple[Any, ...]]) -> None:
        """Call this method of all callbacks that have it, with what ``make`` makes on their thread."""
        if not self._callbacks.have(method):
            return
        ending = await self._wait.wait(self._thread.run(lambda: self._callbacks.call(method, *make())))
        if ending and not self.ending:
            self.ending = f"{ending[0]}.{method} has ended it"
            self._changed.set()

    def close(self) -> None:
        """End the threads. A callback that runs is finished."""
        self._thread.close()
        self._copying.close()
