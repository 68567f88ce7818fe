"""The parts of a client, made in one step once its model is built and its id is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from gradbus.actors.federated.client.client_models import ClientModels, FrozenParameters
from gradbus.actors.federated.client.client_rounds import ClientRounds
from gradbus.actors.federated.client.evaluation_answers import EvaluationAnswers
from gradbus.actors.federated.client.local_evaluation import LocalEvaluation
from gradbus.actors.federated.client.local_training import LocalTraining
from gradbus.actors.federated.client.session import ClientContext
from gradbus.actors.federated.model.flat_model import FlatModel
from gradbus.codecs import Codec
from gradbus.runtime.logs import process_name
from gradbus.runtime.wire.control import PROTOCOL, Hello


class Prepared(NamedTuple):
    """Holds what a client has prepared off the loop, before it takes part.

    Attributes:
        frozen: takes what no round changes. own: codecs of the user's own.
        training, evaluation: on its own data; None: others train for it.
    """

    frozen: FrozenParameters
    own: tuple[type[Codec], ...]
    training: LocalTraining | None = None
    evaluation: LocalEvaluation | None = None


class LocalParts(NamedTuple):
    """The parts of a client that trains and evaluates on its own data."""

    training: LocalTraining
    rounds: ClientRounds
    answers: EvaluationAnswers


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ClientParts:
    """The parts of a client whose model is built and whose id is known. ``local``: None: others train for it."""

    model: FlatModel
    context: ClientContext
    models: ClientModels
    local: LocalParts | None


def hello_of(model: FlatModel, name: str) -> Hello:
    """Return the first Hello of a client: what its model is."""
    return Hello(
        protocol=PROTOCOL,
        dim=model.everything[0],
        layout=model.everything[1],
        ready=False,
        session=0,
        phase="idle",
        round_id=-1,
        model_round=-1,
        host=process_name(),
        next_round=-1,
        masks=True,
        grids=True,
        trained_dim=model.trained[0],
        trained_layout=model.trained[1],
        name=name,
    )
