"""A client's answers to what a controller asks beside training: to evaluate a model, and to show its own.

What is computed for them is in ``local_evaluation.py`` and ``local_training.py``. A request that is repeated gets the
same answer again, so nothing is acknowledged.
"""

from __future__ import annotations

import contextlib

from gradbus.actors.federated.client.client_models import ClientModels
from gradbus.actors.federated.client.client_rounds import Outbox
from gradbus.actors.federated.client.local_evaluation import (
    DECLINED,
    MASKED,
    NO_MODEL,
    NOT_SHARED,
    PRIVATE,
    EvaluationStopped,
    LocalEvaluation,
)
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.session import ClientContext
from gradbus.runtime.errors import BusError
from gradbus.runtime.wire.control import EvaluationRequest, EvaluationResult, LocalModelRequest, Welcome


class EvaluationAnswers:
    """The answers of one client, one at a time. All methods are called on the loop."""

    def __init__(
        self,
        context: ClientContext,
        models: ClientModels,
        evaluation: LocalEvaluation,
        training: LocalTraining,
        outbox: Outbox,
    ) -> None:
        self._context = context
        self._models = models
        self._evaluation = evaluation
        self._training = training
        self._outbox = outbox
        self._result: tuple[tuple[int, int], EvaluationResult] | None = None  # the newest, by session and round
        self._shown = (0, 0)  # session and round under which the local model was uploaded last

    async def evaluate(self, welcome: Welcome, request: EvaluationRequest) -> None:
        """Evaluate a model on the data of this client, and send the result."""
        context, current = self._context, self._context.session
        session, round_id = current.incarnation, request.round_id
        if not context.config.evaluates:
            declined = EvaluationResult(request.run_id, round_id, 0, {}, DECLINED, 0.0)
            self._result = (session, round_id), declined
        if self._result is None or self._result[0] != (session, round_id):
            vector = await self._models.fetch_evaluated(welcome, request)
            if vector is None:
                return
            context.status.set("evaluating")
            context.group.create_task(context.heartbeat.send_hello(), name=f"client-{context.client_id}-hello")
            try:
                result = await context.compute.run(
                    self._evaluation.evaluate,
                    vector,
                    welcome,
                    request,
                    lambda: context.compute.should_stop() or not current.wants_result(request, session),
                    self._models.replica.buffers,
                )
            except EvaluationStopped:
                return
            finally:
                self._models.check_frozen_again()
                context.status.set("idle")
            self._result = (session, round_id), result
        if current.wants_result(request, session):
            await self._send(self._result[1])

    async def show_model(self, welcome: Welcome, request: LocalModelRequest) -> None:
        """Send the model that training here has made, for others to evaluate, or the reason why not. Raises
        BarrierTimeout: no controller for too long."""
        context, session, round_id = self._context, self._context.session.incarnation, request.round_id
        if (session, round_id) == self._shown:
            return  # it is there: the request was repeated before
        transfer, update, why = next(self._outbox.transfers), None, ""
        if context.choices.read(welcome).privacy is not None:
            why = PRIVATE
        elif welcome.masked:
            why = MASKED
        elif not context.config.share_model:
            why = NOT_SHARED
        elif (
            update := await context.compute.run(self._training.encode_local_model, welcome, round_id, transfer)
        ) is None:
            why = NO_MODEL
        if update is None:
            await self._send(EvaluationResult(request.run_id, round_id, 0, {}, why, 0.0))
            return
        receipt = await self._outbox.updates.deliver(update, check=lambda: context.is_same_session(session))
        if receipt is not None:
            self._shown = session, round_id

    async def _send(self, result: EvaluationResult) -> None:
        with contextlib.suppress(BusError):  # it is requested again
            await self._context.publish(result)
