"""``gradbus.client``: a client of a federated run in three lines of an existing training loop.

    with gradbus.client("cells", name="site-1") as fed:
        while fed.receive(model):
            train(model, ...)
            fed.send(model, samples=n, loss=loss)

The bus and the Client run on an event loop in a thread of their own: heartbeats go out while the script trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import operator
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple, NoReturn, Self, SupportsFloat

import torch
from torch import Tensor, nn

from gradbus.actors.federated.client.client_observer import ClientSummary
from gradbus.actors.federated.client.handover import RoundHandover, ScriptResult, TrainingRound
from gradbus.actors.federated.client.handover_client import HandoverClient, HandoverTask
from gradbus.actors.federated.client.pacing import ScriptBudget
from gradbus.actors.federated.client_names import checked_id
from gradbus.actors.federated.model.module_changes import misfit
from gradbus.actors.federated.model.sharing import TensorSpec, specs_of
from gradbus.actors.federated.task_results import as_floats
from gradbus.runtime import forks
from gradbus.runtime.bus.bus import Bus, connect
from gradbus.runtime.bus.transport_factory import network_config
from gradbus.runtime.config.bus import default_job
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import ConfigError, OutOfTurn
from gradbus.runtime.logs import get_logger
from gradbus.runtime.loop_thread import LoopThread
from gradbus.runtime.misuse import WrongArgument, check_keywords
from gradbus.runtime.names import check_name
from gradbus.runtime.torch_compat import unwrapped

NETWORK_KEYWORDS = tuple(inspect.signature(network_config).parameters)
LEAVE_S = 30.0  # for which the end of the block waits for the client and its bus

log = get_logger("client")


def client(
    job: str | None = None,
    *,
    name: str = "",
    client_id: int | None = None,
    config: ClientConfig | None = None,
    callbacks: Sequence[Any] = (),
    **bus: Any,
) -> ScriptClient:
    """Take part in a federated run from a script that has a training loop of its own.

    Args:
        job: name of the job; by default one of this user.
        name: one for each client of the job; the controller assigns an id to it. client_id: an id in place of that, 0
            or more. With security that knows single nodes both may be left out.
        config: settings of the client.
        callbacks: objects as :class:`gradbus.Client` takes them.
        bus: settings of the bus by keyword, as :func:`gradbus.connect` has them: ``network``, ``peers``, ``security``.

    Returns:
        What ``with`` enters; its methods are for the thread that does so.

    Raises:
        ConfigError: a keyword or the name is wrong, or neither a name nor an id is given where one is needed.
        TypeError, ValueError: the id is wrong.
    """
    check_keywords("gradbus.client()", bus, keywords())
    check_named("gradbus.client", name, client_id, bus)
    if client_id is not None:
        client_id = checked_id(client_id)
    if name:
        check_name(name)
    job = default_job() if job is None else job
    config = ClientConfig.expect(config)
    ScriptBudget.check(config.budget)
    network = network_config(**{key: bus.pop(key) for key in NETWORK_KEYWORDS if key in bus})
    return ScriptClient(job, Named(name, client_id), config, connect(job, network=network, **bus), callbacks)


def keywords() -> frozenset[str]:
    """Return the names of all that :func:`client` takes, the settings of the bus included."""
    own = (name for name, one in inspect.signature(client).parameters.items() if one.kind is not one.VAR_KEYWORD)
    return frozenset((*own, *inspect.signature(connect).parameters, *NETWORK_KEYWORDS))


def check_named(call: str, name: Any, client_id: Any, bus: Mapping[str, Any]) -> None:
    """Check that there is a name or an id.

    Args:
        call: how a program calls what needs it. bus: settings of the bus.

    Raises:
        WrongArgument: there is neither, and the security of the bus knows no single nodes.
    """
    security = bus.get("security")
    if not name and client_id is None and getattr(security, "level", security) != "identity":
        raise WrongArgument(
            f"{call}(...): neither name nor client_id is given, and the controller has to know this client by one of "
            f"them. Write {call}('cells', name='site-1'), with another name for each client of the job"
        )


class Named(NamedTuple):
    """How a client is known: by its name, its id, or both; ``client_id`` None: the controller assigns one."""

    name: str
    client_id: int | None


class ScriptClient(contextlib.AbstractContextManager["ScriptClient"]):
    """A client of a federated run, for a script. Made by :func:`gradbus.client`."""

    def __init__(
        self,
        job: str,
        named: Named,
        config: ClientConfig,
        opening: contextlib.AbstractAsyncContextManager[Bus],
        callbacks: Sequence[Any] = (),
    ) -> None:
        """A client that has not been entered. ``opening``: gives the bus."""
        self.job = job
        self._named = named
        self._config = config
        self._opening = opening
        self._callbacks = callbacks
        self._paused_by: int | None = None  # the thread that has paused it; None: it is not paused
        self._handover = RoundHandover()
        self._round: TrainingRound | None = None
        self._task: HandoverTask | None = None  # from the first receive on
        self._specs: list[TensorSpec] = []
        self._has_begun = asyncio.Event()  # there is a task
        self._client: HandoverClient | None = None
        self._thread: LoopThread[ClientSummary | None] | None = None
        self._made_in = forks.generation
        self._in_use = threading.Lock()

    def __enter__(self) -> Self:
        """Join the job. Raises ConfigError, BusError: the bus cannot be opened."""
        if self._thread is not None:
            raise OutOfTurn("this client was entered before: call gradbus.client again for each 'with'")
        self._made_in = forks.generation
        self._thread = LoopThread(self._main(), f"gradbus-client-{self._shown}", daemon=True)
        self._thread.start()
        try:
            self._handover.wait_until_open()
        except BaseException:
            self._leave(self._thread)
            raise
        if self._thread.has_ended or self._handover.is_over:
            self._thread.result()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Leave the run. An error of the script is the reason that the controller is given."""
        if self._thread is None or self._made_in != forks.generation:
            return
        if isinstance(error, Exception) and self._client is not None and not self._handover.is_over:
            self._thread.call_soon(self._client.note_failure, error)
        self._leave(self._thread)

    def abandon(self) -> None:
        """Leave the run without waiting until that is done, on any thread, as a finalizer has to."""
        if self._thread is not None and self._made_in == forks.generation and not self._handover.is_over:
            self._handover.leave()
            self._thread.cancel()

    async def __aenter__(self) -> NoReturn:
        raise TypeError(
            "gradbus.client(...) is for scripts without asyncio: write 'with gradbus.client(...) as fed:'. On an event "
            "loop use gradbus.connect and gradbus.Client"
        )

    async def __aexit__(self, *_: object) -> None:
        """Never reached: ``async with`` looks for it before it enters."""

    @property
    def round(self) -> TrainingRound:
        """Return what the controller asks for in the round of the newest :meth:`receive`. Raises OutOfTurn: there was
        none."""
        if self._round is None:
            raise OutOfTurn("there is no round before the first receive: call receive(model) first")
        return self._round

    @property
    def should_stop(self) -> bool:
        """Return whether the round is over for this client, so that training any longer is of no use. Call
        :meth:`receive` then."""
        return self._handover.should_stop()

    def receive(self, model: nn.Module, *, timeout_s: float | None = None) -> bool:
        """Wait for the next round and load the global model into ``model``.

        A round that was received and not sent counts as one in which there was nothing to train. At the end of the run
        ``model`` has the last global model. While the client is paused this waits for another thread to resume it.

        Args:
            model: on any device; the same one in each call, or one with tensors of the same names and shapes. Its
                trained parameters become views of one vector, and stay the objects that they are. Of a model within
                ``DistributedDataParallel``, ``DataParallel`` or ``torch.compile`` the inner one is meant.
            timeout_s: for how long to wait; None: until there is a round, or the run has ended.

        Returns:
            False when the run has ended well. The model then holds the last global model, if that has arrived.

        Raises:
            TimeoutError: no round has begun within ``timeout_s``. Call it again to go on waiting.
            JoinRefused: the controller has refused this client. JoinDeclined: it asks for what this client does not
                give. BarrierTimeout: there was no controller for ``controller_timeout_s``. RunAborted: the run has
                failed. ConfigError: the model does not fit. OutOfTurn: outside of the ``with`` block, or this thread
                has paused the client. ForkedProcess.
        """
        with self._used_by("receive") as thread:
            if self._paused_by == threading.get_ident():
                raise OutOfTurn(
                    "receive was called while the client is paused by this same thread: call resume() first"
                )
            model = unwrapped(model)
            task = self._checked(model)
            self._handover.begin_wait()
            thread.call_soon(self._wake)
            found = self._handover.take(timeout_s)
            if found is None:
                thread.result()
                self._load_last(task, model)
                return False
            self._round = found
            if model is not task.model:
                self._copy(task.model, model)
            return True

    def send(
        self,
        model: nn.Module,
        *,
        samples: int,
        loss: SupportsFloat | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> bool:
        """Send what was trained since :meth:`receive`, and wait until it has arrived.

        Args:
            model: as after training.
            samples: distinct samples trained on, >= 1: the weight in the mean of all clients.
            loss: mean training loss, a number or a tensor of one value. metrics: more numbers by name, at most 32.

        Returns:
            Whether it counts. False: the round was over, or the update cannot be used, which the log explains.

        Raises:
            OutOfTurn: a second send for one receive, or none was there. ValueError, TypeError: there are no samples, or
                the loss or a metric is not a number. ConfigError: the model does not fit. ForkedProcess. And what has
                ended the client, as of :meth:`receive`.
        """
        with self._used_by("send") as thread:
            self._handover.check_taken()
            model = unwrapped(model)
            task = self._checked(model)
            if isinstance(loss, Tensor):
                loss = loss.detach()  # a tensor with a graph is no number, by torch's own warning
            result = ScriptResult(
                _checked_samples(samples), None if loss is None else float(loss), _checked_metrics(metrics)
            )
            if model is not task.model:
                self._copy(model, task.model)
            counts = self._handover.give(result)
            if not counts and self._handover.is_over:
                thread.result()
            return counts

    def pause(self) -> None:
        """Take part in no round until :meth:`resume`: the controller does not wait for this client. A round that was
        received is over, as :attr:`should_stop` says. May be called by any thread."""
        self._set_paused(self._entered("pause"), threading.get_ident())

    def resume(self) -> None:
        """Take part again, from the next round on. May be called by any thread."""
        self._set_paused(self._entered("resume"), None)

    @property
    def client_id(self) -> int | None:
        """Return its id; None: the controller has not assigned one yet."""
        if self._client is None or self._client.client_id < 0:
            return self._named.client_id
        return self._client.client_id

    # Parts

    @property
    def _shown(self) -> str:
        return self._named.name or str(self._named.client_id)

    @contextlib.contextmanager
    def _used_by(self, call: str) -> Iterator[LoopThread[ClientSummary | None]]:
        """The client's thread, for one call at a time. Raises OutOfTurn, ForkedProcess."""
        thread = self._entered(call)
        if not self._in_use.acquire(blocking=False):
            raise OutOfTurn(
                f"{call} was called while another thread is in a call of this client: one thread receives, trains and "
                f"sends. Give each thread a client of its own, with its own model"
            )
        try:
            yield thread
        finally:
            self._in_use.release()

    def _entered(self, call: str) -> LoopThread[ClientSummary | None]:
        if self._thread is None:
            raise OutOfTurn(f"{call} was called outside of a 'with' block: write 'with gradbus.client(...) as fed:'")
        forks.check(self._made_in, f"the client of job {self.job!r}")
        if self._handover.has_left:
            raise OutOfTurn(f"{call} was called after the 'with' block, which has left the run: call it inside")
        return self._thread

    def _checked(self, model: nn.Module) -> HandoverTask:
        """The task, whose model this one fits. Raises ConfigError: it does not."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"expected the model, a torch.nn.Module, got {type(model).__name__}")
        if self._task is None:
            self._task, self._specs = HandoverTask(model, self._handover), specs_of(model)
        elif difference := misfit(model, self._specs):
            raise ConfigError(
                f"the model is not the one of the first receive: {difference}. Pass the same model to each receive "
                f"and send, or one with tensors of the same names and shapes"
            )
        return self._task

    @torch.no_grad()
    def _copy(self, source: nn.Module, target: nn.Module) -> None:
        tensors, into = source.state_dict(keep_vars=True), target.state_dict(keep_vars=True)
        for spec in self._specs:
            into[spec.name].copy_(tensors[spec.name])

    def _set_paused(self, thread: LoopThread[ClientSummary | None], paused_by: int | None) -> None:
        self._paused_by = paused_by
        thread.call_soon(self._apply_pause, paused_by is not None)

    def _apply_pause(self, is_paused: bool) -> None:
        """On the loop: pass on that the client is paused, or resumed. A pause that ends at once counts, too: the round
        that was received is over."""
        if self._client is not None:
            (self._client.pause if is_paused else self._client.resume)()

    def _load_last(self, task: HandoverTask, model: nn.Module) -> None:
        """Load the last global model into the script's. The client has ended."""
        if self._client is not None and self._client.load_newest() >= 0 and model is not task.model:
            self._copy(task.model, model)

    def _leave(self, thread: LoopThread[ClientSummary | None]) -> None:
        if not self._handover.is_over:
            thread.cancel()
        self._handover.leave()
        if not thread.wait(LEAVE_S):
            log.warning("client still running", client=self._shown, waited_s=LEAVE_S)

    def _wake(self) -> None:
        """On the loop: the script waits for a round."""
        self._has_begun.set()
        if self._client is not None:
            self._client.wake()

    async def _main(self) -> ClientSummary | None:
        """The client, from its bus to its end."""
        try:
            async with self._opening as bus:
                self._handover.open()
                await self._has_begun.wait()
                assert self._task is not None
                self._client = HandoverClient(
                    bus,
                    self._task,
                    self._handover,
                    client_id=self._named.client_id,
                    name=self._named.name,
                    config=self._config,
                    callbacks=self._callbacks,
                )
                self._apply_pause(self._paused_by is not None)
                try:
                    return await self._client.run()
                finally:
                    self._handover.end()
        finally:
            self._handover.end()


def _checked_metrics(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """The metrics as numbers. Raises ValueError: one is none."""
    try:
        return as_floats(
            {name: one.detach() if isinstance(one, Tensor) else one for name, one in (metrics or {}).items()}
        )
    except Exception as error:
        raise ValueError(
            f"metrics: expected single numbers by name, such as {{'accuracy': 0.9}}, got {metrics!r:.200} ({error})"
        ) from error


def _checked_samples(samples: Any) -> int:
    """The number of samples. Raises ValueError: it is none."""
    try:
        number = operator.index(samples)
    except TypeError:
        number = 0
    if number < 1:
        raise ValueError(
            f"samples: expected the number of samples trained on, 1 or more, got {samples!r}. Where there was nothing "
            f"to train, call receive again without send: this client sits the round out"
        )
    return number
