"""From what training has changed to the bytes of an update: clipped and with noise, in the codec of the run, masked.

What a lossy codec leaves out is the residual of this client, and goes out with its next update: what of that may be
sent once more is decided here. On the compute thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from gradbus import codecs
from gradbus.actors.aggregation import updates
from gradbus.actors.aggregation.exact_sum import LARGEST, fits
from gradbus.actors.federated.client.client_state import RESIDUAL, SECTION_RESIDUAL, ClientStateStore
from gradbus.actors.federated.client.packets_out import RoundPackets
from gradbus.actors.federated.client.round_inputs import RoundPlan
from gradbus.actors.federated.client.rules.base import RoundEnd
from gradbus.actors.federated.client.unsent_residuals import UnsentResiduals
from gradbus.actors.federated.client.updates_out import EncodedUpdate
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.actors.federated.protocol import NON_FINITE_MODEL
from gradbus.actors.federated.task_results import NonFiniteResult
from gradbus.actors.privacy.client import ClientPrivacy
from gradbus.actors.secure_aggregation import masked_values
from gradbus.codecs import Codec, NonFiniteError
from gradbus.codecs.base import l2_norm
from gradbus.codecs.fp32 import Fp32
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.logs import get_logger

_MUCH_UNSENT = 5.0  # times an update

log = get_logger("client")


class EncodedChange(NamedTuple):
    """Holds what training has changed as bytes.

    Attributes:
        payload: of the update, with its sections.
        residuals: what to keep of them if the update counts, by the names of kept tensors.
        update_norm: L2 norm of what training has changed. residual_norm: of the residual; -1: it is not told.
        metrics: to announce, by name.
    """

    payload: bytes | memoryview
    residuals: dict[str, Tensor]
    update_norm: float
    residual_norm: float
    metrics: dict[str, float]


class UpdateEncoder:
    """Encodes the updates of one client, one after the other."""

    def __init__(self, model: FlatModel, kept: ClientStateStore, client_id: int) -> None:
        """``model``: holds what was trained. ``kept``: the states of this client, and what it has released."""
        self._model = model
        self._kept = kept
        self._client_id = client_id
        self._unsent = UnsentResiduals()
        self._feeds_back = False  # what masking takes from the newest update is its residual
        self._update_norm = 0.0  # of the newest training
        self._has_warned = False

    def encode(
        self, plan: RoundPlan, end: RoundEnd, packets: RoundPackets | None, kept: Mapping[str, Tensor], samples: int
    ) -> EncodedChange:
        """Encode what training has changed.

        Args:
            end: what the rule has left. packets: of the update, in place of the trained model; None: there are none.
            kept: the state of this client before the round. samples: that were trained on.

        Raises:
            NonFiniteResult: the model is not finite. TooLarge: it would be refused. ConfigError: the rule sends more
                than the model, which would have no noise.
        """
        run, inputs, codec = plan.run, plan.inputs, plan.codec
        self._feeds_back = inputs.welcome.masked and not codec.lossless
        before = self._residual_before(plan, kept)
        change, metrics = None if packets is None else _change_of(packets), _finite(end.metrics)
        if run.privacy is not None:
            change, facts = self._protected(run.privacy, plan, end, change)
            metrics |= facts
        encoded, residual, change = self._encode(codec, inputs.base, before, change, packets)
        self._update_norm = l2_norm(change)
        self._check_room(encoded, codec, inputs.base, samples, before)
        sections, residuals = _encode_sections(end.sections, run.section_codec, kept)
        if residual is not None:
            residuals[RESIDUAL] = residual
        return EncodedChange(
            payload=updates.join([(updates.MODEL, encoded), *sections]) if sections else encoded,
            residuals=residuals,
            update_norm=self._update_norm,
            residual_norm=-1.0 if self._feeds_back else 0.0 if residual is None else l2_norm(residual),
            metrics=metrics,
        )

    def mask(
        self, update: EncodedUpdate, base: Tensor, masks: masked_values.UpdateMasks
    ) -> tuple[bytes | memoryview, Mapping[str, Tensor]]:
        """Return the payload with these masks, which are used up, and what to keep if the update counts. With a codec
        that compresses, it is rounded to the grid of the attempt only now, and what that takes away is its residual.

        Args:
            base: float32, shape (D,): the model that it was trained from.

        Raises:
            TooLarge: it has no room in the sum of so many clients.
        """
        request = update.request
        payload, residual, clamped = masked_values.encode(
            codecs.parse(update.payload, expected_dim=base.numel()), base, masks, request.num_samples
        )
        assert self._feeds_back or residual is None, "a roster with a grid is refused where the codec has none"
        if not self._feeds_back:
            return payload, update.state
        # None: the residual before has gone out, and no older one may come back.
        residual = torch.zeros_like(base) if residual is None else residual
        self._unsent.note((request.run_id, request.round_id), masks.roster.terms, residual)
        self._warn_of_unsent(request.round_id, residual, clamped)
        return payload, {**update.state, RESIDUAL: residual}

    def _residual_before(self, plan: RoundPlan, kept: Mapping[str, Tensor]) -> Tensor | None:
        """Return the residual of earlier updates, float32, shape (D,); None: there is none."""
        residual, inputs = kept.get(RESIDUAL), plan.inputs
        if not self._feeds_back:
            return residual
        name, after = (inputs.welcome.run_id, inputs.command.round_id), self._kept.last_before(plan.number)
        return self._unsent.before(name, after, residual, inputs.spent)

    def _warn_of_unsent(self, round_id: int, residual: Tensor, clamped: int) -> None:
        """Log, once, that little of what is trained goes out."""
        if not self._has_warned and (norm := l2_norm(residual)) > _MUCH_UNSENT * self._update_norm > 0.0:
            self._has_warned = True
            log.warning(
                "most of what was trained has not gone out",
                client=self._client_id,
                round=round_id,
                updates=round(norm / self._update_norm, 1),
                values_at_the_limit=clamped,
                effect="it comes in later rounds, where the controller's steps let it",
                remedy="if that goes on, look at docs/secure-aggregation.md, or use the codec fp32",
            )

    @torch.no_grad()
    def _protected(
        self, privacy: ClientPrivacy, plan: RoundPlan, end: RoundEnd, change: Tensor | None
    ) -> tuple[Tensor, dict[str, float]]:
        """What training has changed, clipped and with noise, and the metrics to announce. A round that is done again
        gives what it has given before, which tells no more than once. ``change``: in place of the trained model.
        Raises ConfigError: the rule sends more than the model, which would have no noise."""
        inputs = plan.inputs
        if privacy.is_local and end.sections:
            raise ConfigError(
                f"the training rule {inputs.welcome.rule} sends {', '.join(end.sections)} without noise: with local "
                f"privacy this client sends the model alone. Choose another rule on the controller"
            )
        round_id = inputs.command.round_id
        if privacy.is_local and (released := self._kept.released(round_id)) is not None:
            return released, {}
        change = self._model.read() - inputs.base if change is None else change
        change, facts = privacy.protected(change, inputs.broadcast)
        if privacy.is_local and bool(torch.isfinite(change).all()):  # else nothing leaves
            self._kept.release(round_id, change)
        return change, facts

    @torch.no_grad()
    def _encode(
        self,
        codec: Codec,
        base: Tensor,
        residual: Tensor | None,
        change: Tensor | None,
        packets: RoundPackets | None,
    ) -> tuple[bytes | memoryview, Tensor | None, Tensor]:
        """The update's bytes, with a lossy codec the residual, and what training has changed. ``change``: in place of
        that. Of an update that leaves in ``packets``: their sum, and the residual as it was, as their codecs are the
        task's."""
        if change is not None and packets is not None and packets.leaves:
            return packets.sum(), residual, change
        try:
            if change is None and isinstance(codec, Fp32) and codec.version > 1 and not self._feeds_back:
                message, change = codec.difference(self._model.read(), base)
                return message, None, change
            local = self._model.read() if change is None else base + change
            change = local - base if change is None else change
            if self._feeds_back:  # in full: what the codec does is done on the grid of the attempt, when it is masked
                return codecs.get("fp32").encode(change if residual is None else change + residual), None, change
            # Version 1 of fp32 and q8 means weights; all else is the difference to the model of the round before.
            vector = local if codec.version == 1 and not codec.v1_is_delta else change
            if codec.lossless:
                return codec.encode(vector), None, change
            return *codecs.residual_step(vector, residual, codec), change
        except NonFiniteError as error:
            raise NonFiniteResult(
                NON_FINITE_MODEL, f"training made the model non-finite: {error}. Lower the learning rate"
            ) from None

    def _check_room(
        self, payload: bytes | memoryview, codec: Codec, base: Tensor, samples: int, residual: Tensor | None
    ) -> None:
        """Raises TooLarge: the update would be refused, as it has no room in the sum. ``residual``: that is in it."""
        norm = self._update_norm + (0.0 if residual is None else l2_norm(residual))
        # No value is larger than the norm, which is known; half, as a lossy codec may round up.
        if samples * norm < LARGEST / 2 or fits(
            codecs.parse(payload, expected_dim=base.numel(), own=(type(codec),)), base, samples
        ):
            return
        raise masked_values.TooLarge(
            f"training changed the model by {self._update_norm:.3g}, which with {samples} samples is more than the sum "
            f"of all clients has room for. Lower the learning rate"
        )


def _encode_sections(
    sections: Mapping[str, Tensor], codec: Codec, kept: Mapping[str, Tensor]
) -> tuple[list[tuple[str, bytes]], dict[str, Tensor]]:
    """The sections beside the model's by name, and what to keep: with a lossy codec their residuals."""
    encoded, residuals = [], {}
    try:
        for name, vector in sections.items():
            if codec.lossless:
                payload = codec.encode(vector, is_delta=True)
            else:
                key = SECTION_RESIDUAL + name
                payload, residuals[key] = codecs.residual_step(vector, kept.get(key), codec, is_delta=True)
            encoded.append((name, payload))
        return encoded, residuals
    except NonFiniteError as error:
        raise NonFiniteResult(NON_FINITE_MODEL, f"training made {', '.join(sections)} non-finite: {error}") from None


def _change_of(packets: RoundPackets) -> Tensor | None:
    """What the packets come to; None: there are none. Raises NonFiniteResult: their sum is not finite."""
    try:
        return packets.change()
    except NonFiniteError as error:
        raise NonFiniteResult(NON_FINITE_MODEL, f"the sum of the packets is not finite: {error}") from None


def _finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics as they are announced: numbers that are finite."""
    return {str(name): float(value) for name, value in metrics.items() if math.isfinite(value)}
