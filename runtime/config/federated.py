"""Settings of a federated run: those of its controller, and those of a client."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError, model_validator

from gradbus.runtime.choices import (
    CLIENT_OPTIMIZERS,
    CLIENT_RULES,
    CLIENT_SCHEDULES,
    CODECS,
    PRIVACY,
    SELECTORS,
    STRATEGIES,
    Choice,
)
from gradbus.runtime.config.settings import (
    CheckpointSettings,
    Duration,
    Fraction,
    HistorySettings,
    NonNegative,
    Positive,
    Settings,
)
from gradbus.runtime.errors import ConfigError


def _in_64_bits(value: Any) -> Any:
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 64:
        raise ValueError("expected a number of at most 64 bits, which is what a message has room for")
    return value


ClientOptions = Annotated[
    dict[
        Annotated[str, Field(max_length=64)],
        Annotated[bool | int | float | Annotated[str, Field(max_length=256)], AfterValidator(_in_64_bits)],
    ],
    Field(max_length=32),
]
"""Options of a client rule and of an optimizer, which travel to the clients."""

_OPTIONS: TypeAdapter[dict[str, Any]] = TypeAdapter(ClientOptions)  # to make it takes as long as to check all settings


def _can_travel(options: Mapping[str, Any], what: str) -> None:
    try:
        _OPTIONS.validate_python(options)
    except ValidationError:
        raise ValueError(
            f"options of {what} travel to the clients: expected at most 32, each true, false, a number, of 64 bits "
            f"if it is an integer, or a text of at most 256 characters"
        ) from None


def _rule_can_travel(rule: Choice) -> Choice:
    _can_travel(rule.options, "a rule")
    return rule


Patterns = Annotated[tuple[Annotated[str, Field(min_length=1, max_length=200)], ...], Field(max_length=64)]
"""Patterns of tensor names, which travel to the clients."""


OwnCodecs = Annotated[tuple[Annotated[str, Field(max_length=256, pattern=":")], ...], Field(max_length=16)]
"""Names of codecs that are not built in, as package.module:Name."""


class ShareSettings(Settings):
    """Which tensors of the model are shared, by the names of its state; see docs/personal.md."""

    include: Patterns = ("*",)
    """Patterns of names, where `*` stands for any characters: of what `exchange` exchanges, only what one of them
    matches. The rest is personal: trained at each client, kept there and never sent."""
    exclude: Patterns = ()
    """Patterns of what is personal all the same, such as `["*.bn*"]` for the batch normalisation of each client, or
    `["head.*"]` for its last layer."""

    @model_validator(mode="after")
    def _consistent(self) -> ShareSettings:
        if not self.include:
            raise ValueError("include is empty, so nothing would be shared: leave it out to share everything")
        return self


BufferRule = Literal["max", "any", "min", "all", "sum", "median", "keep"]

MetricName = Annotated[str, Field(min_length=1, max_length=80)]
OF_CLIENTS = "client."  # in front of the name of a metric that clients have found


def split_metric(metric: str) -> tuple[str, str]:
    """The name that a task gives a metric, and which number over clients is meant: ``median``, ``std``, ``min`` or
    ``max``; empty: their mean, or the metric is none of clients."""
    name, _, over_clients = metric.removeprefix(OF_CLIENTS).rpartition(".")
    if metric.startswith(OF_CLIENTS) and over_clients in ("median", "std", "min", "max"):
        return name, over_clients
    return metric.removeprefix(OF_CLIENTS), ""


def _need(settings: Settings, key: str, *others: str) -> None:
    """Raises ValueError: others than their defaults are set for settings that have no effect without ``key``. Where
    that is set to null or 0 it is meant to be switched off, as in a configuration that was written down, which has
    every setting."""
    given, fields = settings.model_fields_set, type(settings).model_fields
    without = [other for other in others if other in given and getattr(settings, other) != fields[other].default]
    if key not in given and without:
        raise ValueError(f"{without[0]} has no effect without {key}: set {key}, too, or leave {without[0]} out")


class ClientsSettings(Settings):
    """The clients: how many there are, and when one counts as gone."""

    kind: Literal["clients", "sites"] = "clients"
    """Who takes part: `clients`, which train, or `sites`: Controllers, each with the exact sum of its own clients; see
    docs/trees.md. The settings below are then of the sites."""
    num: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of clients that are expected. null: unknown; the run starts with `min`."""
    min: Annotated[int, Field(ge=1, le=100_000)] = 1
    """Least number of updates that make a round once its deadline has passed, and least number of clients to start
    with."""
    start_timeout_s: Duration = 120.0
    """Seconds after which the run fails if there are fewer than `min`."""
    start_grace_s: NonNegative = 10.0
    """Seconds to wait for the remaining expected clients once there are `min`."""
    heartbeat_s: Annotated[float, Field(ge=0.01, le=3600)] = 0.5
    """Seconds between two heartbeats of the controller and of each client."""
    dead_after_s: Duration = 30.0
    """Silence, in seconds, after which a client that does not train counts as hanging: rounds do not wait for it until
    its next message. The end of a process is noticed without it, by the kernel or by the DDS lease, and a client that
    trains may be silent for `round.timeout_s`. At least 3 x `heartbeat_s`."""

    @model_validator(mode="after")
    def _consistent(self) -> ClientsSettings:
        if self.num is not None and self.min > self.num:
            raise ValueError(f"min ({self.min}) is more than num ({self.num})")
        if self.dead_after_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"dead_after_s ({self.dead_after_s:g}) must be at least 3 x heartbeat_s ({self.heartbeat_s:g}): "
                f"one late heartbeat is not a death"
            )
        return self


class RoundSettings(Settings):
    """When a round ends."""

    timeout_s: Duration = 300.0
    """Deadline of a round, in seconds after its command."""
    timeout_times_median: Annotated[float, Field(ge=1, le=1000)] | None = None
    """Deadline of a round as a multiple of the median time of the last five, within `timeout_s`, which holds for the
    first three and for further attempts at a round; see docs/selection.md. null: `timeout_s` holds for all."""
    quorum: Fraction = 1.0
    """Share of the expected clients whose updates suffice before the deadline, once `grace_s` has passed since they
    arrived. 1: wait for all clients that are alive."""
    grace_s: NonNegative = 5.0
    """Seconds that the other clients may still take after the quorum."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """How often a round is tried that ends with too few updates."""


IN_COMMAND: Mapping[str, TypeAdapter[Any]] = {
    "epochs": TypeAdapter(Annotated[int, Field(ge=1, le=0x7FFF_FFFF)]),
    "subset_size": TypeAdapter(Annotated[int, Field(ge=0, le=0x7FFF_FFFF)]),
    "lr": TypeAdapter(Positive),
    "seed": TypeAdapter(Annotated[int, Field(ge=0, le=0x7FFF_FFFF)]),
}
"""Settings of a round that its command has fields for."""

IN_TERMS: Mapping[str, TypeAdapter[Any]] = {
    "steps": TypeAdapter(Annotated[int, Field(ge=0, le=0x7FFF_FFFF)]),
    "density": TypeAdapter(Annotated[float, Field(gt=0, le=1)]),
}
"""Settings of a round that go with its command, as ``training.KEY`` of its options."""


class AsynchronousSettings(Settings):
    """Rounds without waiting, with `mode` = `asynchronous`; see docs/asynchronous.md."""

    buffer: Annotated[int, Field(ge=1, le=100_000)] = 10
    """Number of updates that make the next model."""
    repeats: bool = True
    """Whether a client whose update counts trains again from the same model while there is no newer one, so that fast
    clients count more often. false: it waits for the next model, and counts at most once in each."""
    max_staleness: Annotated[int, Field(ge=0, le=10_000)] = 50
    """Largest number of models by which the base of an update may be behind the newest one. An older update is refused,
    and its client goes on from the newest model."""
    staleness_power: Annotated[float, Field(ge=0, le=8, allow_inf_nan=False)] = 0.5
    """An update whose base is s models behind counts (1 + s)^-p times. 0: in full."""
    bases_bytes: Annotated[int, Field(ge=0)] = 1 << 30
    """Memory, in bytes, for copies of the newest model and of earlier ones, with codecs whose updates hold weights and
    not differences. An update from a model that had to make room is refused."""
    proportional_steps: bool = False
    """Whether slow clients make fewer steps than `training.steps`, in proportion to their speed, so that all trainings
    take about as long."""
    grace_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the slack that the others may still take once there are `buffer` updates: of the time of a training,
    less what has passed since the first update of the buffer, less the time of the last commit. 0: none."""


class TrainingSettings(Settings):
    """How the clients train. The controller sends it to them."""

    renamed: ClassVar[Mapping[str, str]] = {
        "learning_rate": "lr",
        "local_epochs": "epochs",
        "local_steps": "steps",
        "samples": "subset_size",
        "samples_per_round": "subset_size",
    }

    epochs: Annotated[int, Field(ge=1, le=0x7FFF_FFFF)] = 1
    """Number of passes of a client over its samples in a round."""
    steps: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Number of optimizer steps of a client in a round, in place of `epochs`: its passes over its samples go on until
    then. 0: `epochs` holds."""
    keep_optimizer: bool = False
    """Whether the state of a client's optimizer goes on from round to round, as in DiLoCo; it stays at the client, in
    `client.state_dir` where that is set. With an `optimizer` that is named here."""
    lr: Positive = 0.01
    """Learning rate of the clients, where `optimizer` names none."""
    optimizer: Annotated[Choice, CLIENT_OPTIMIZERS] = CLIENT_OPTIMIZERS.default
    """Optimizer of the clients, made anew for each round: a class of torch.optim, such as adamw, with its options; or
    task, the one that the task makes, SGD with `task.momentum` and `task.weight_decay` if the task is ours."""
    schedule: Annotated[Choice, CLIENT_SCHEDULES] = CLIENT_SCHEDULES.default
    """How the learning rate changes from round to round: a class of torch.optim.lr_scheduler, such as cosine, with its
    options, where a step is a round. Within a round it stays. Or your own, as package.module:Name."""
    subset_size: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Number of samples that a client trains on in a round. 0: all of its own."""
    rule: Annotated[Choice, CLIENT_RULES, AfterValidator(_rule_can_travel)] = CLIENT_RULES.default
    """What changes the steps of a client, such as plain; docs/tuning.md lists all. Or your own, as package.module:Name:
    each client has to name it as `client.rule`, too, as a client imports nothing that the network names."""

    from_round: Annotated[dict[Annotated[int, Field(ge=1)], ClientOptions], Field(max_length=1000)] = Field(default={})
    """Settings that change while the run goes on: by round, from which on they hold, values of `epochs`, `steps`,
    `subset_size`, `lr`, `seed`, of `density`, which is that of `codec`, and of options of the rule, as in
    `{"1": {"epochs": 5}, "20": {"epochs": 1}}`. Of `epochs` and `steps` the one that was set last holds. An `lr` given
    here is in place of the schedule's."""

    def changes(self, round_id: int) -> dict[str, Any]:
        """Return what `from_round` has for this round: of each setting the newest value."""
        before = [self.from_round[at] for at in sorted(self.from_round) if at <= round_id]
        found: dict[str, Any] = {}
        for changed in before:
            if "epochs" in changed and (self.steps or "steps" in found):
                found["steps"] = 0  # rounds are counted in epochs from here on
            found.update(changed)
        return found

    def terms_of(self, round_id: int) -> dict[str, Any]:
        """Return what clients are sent of :meth:`changes` beside the command of the round."""
        changed = {key: value for key, value in self.changes(round_id).items() if key not in IN_COMMAND}
        return {f"training.{key}" if key in IN_TERMS else key: value for key, value in changed.items()}

    def given_from(self, key: str) -> list[Any]:
        """The values that `from_round` has for a setting, in the order of their rounds."""
        return [self.from_round[at][key] for at in sorted(self.from_round) if key in self.from_round[at]]

    def list_work(self, first: int, last: int) -> list[tuple[int, int]]:
        """What is asked of a client in these rounds, both included: epochs and steps, where 0 steps are as many as the
        epochs have."""
        rounds = {max(1, first), *(at for at in self.from_round if first < at <= last)}
        changed = [self.changes(round_id) for round_id in rounds]
        return [(one.get("epochs", self.epochs), one.get("steps", self.steps)) for one in changed]

    @property
    def has_terms(self) -> bool:
        """Whether some round has settings that a TrainCmd has no field for."""
        rounds_in_steps = self.steps and self.given_from("epochs")
        return bool(rounds_in_steps) or any(set(changed) - IN_COMMAND.keys() for changed in self.from_round.values())

    @model_validator(mode="after")
    def _changes_fit(self) -> TrainingSettings:
        if not self.from_round:
            return self
        is_own = ":" in self.rule.name
        rule = {} if is_own else CLIENT_RULES.options_of(self.rule.name).model_fields
        for at, changed in self.from_round.items():
            for key, value in changed.items():
                if is_own and key in IN_TERMS and key in self.rule.options:
                    raise ValueError(
                        f"from_round {at}: {key} is a setting of the round here, and {self.rule.name} has an option of "
                        f"this name. Call the option otherwise, or leave it out of from_round"
                    )
                if (known_type := IN_COMMAND.get(key) or IN_TERMS.get(key)) is not None:
                    known_type.validate_python(value, strict=True)
                elif key not in rule and not is_own:
                    known = ", ".join([*IN_COMMAND, *IN_TERMS, *rule])
                    raise ValueError(f"from_round {at}: there is no {key!r} that can change; there are {known}")
            if changed.get("steps") and "epochs" in changed:
                raise ValueError(
                    f"from_round {at}: epochs and steps, where a round is counted in one: give one of them"
                )
            if own := {key: value for key, value in changed.items() if key in rule}:
                CLIENT_RULES.check({**self.rule.options, **own, "name": self.rule.name})
        return self

    @model_validator(mode="after")
    def _consistent(self) -> TrainingSettings:
        own = self.optimizer.options.get("lr")
        default = type(self).model_fields["lr"].default  # it may be written down beside the optimizer's
        if own is not None and self.lr not in (default, own):
            raise ValueError(f"lr is {self.lr:g}, and optimizer.lr {own:g}: give one of them")
        if (
            self.steps and self.epochs != type(self).model_fields["epochs"].default
        ):  # not what is set: it may be written down
            raise ValueError(f"epochs is {self.epochs}, and steps {self.steps}: give one of them")
        own_epochs = [self.rule.options, *self.from_round.values()]
        steps = next(filter(None, [self.steps, *self.given_from("steps")]), 0)
        if steps and any(changed.get("own_epochs") for changed in own_epochs):
            raise ValueError(
                f"rule.own_epochs and steps ({steps}): the personal model takes as many steps as the global one. "
                f"Give one of them"
            )
        if self.keep_optimizer and self.optimizer.name == "task":
            raise ValueError("keep_optimizer: a task makes an optimizer of its own in each round. Name one, as adamw")
        _can_travel(self.sent_options(), "the rule and the optimizer")
        return self

    @property
    def first_lr(self) -> float:
        """The learning rate that the schedule begins with."""
        return float(self.optimizer.options.get("lr", self.lr))

    def sent_options(self) -> dict[str, Any]:
        """What clients are sent: options of the rule, and name and options of the optimizer as ``optimizer.KEY``, lists
        as JSON text."""
        named = self.optimizer.name != "task"
        chosen = self.optimizer.model_dump(mode="json", exclude={"lr"}) if named else {}
        optimizer = {
            f"optimizer.{key}": json.dumps(value) if isinstance(value, list | dict) or value is None else value
            for key, value in chosen.items()
        }
        return {**self.rule.options, **optimizer}

    def sent_terms(self, mode: str, repeats: bool) -> dict[str, Any]:
        """Return what clients are sent beside :meth:`sent_options`: how a round is counted, as ``training.KEY``."""
        terms: dict[str, Any] = {}
        if self.steps:
            terms["training.steps"] = self.steps
        if self.keep_optimizer:
            terms["training.keep_optimizer"] = True
        if mode == "asynchronous":
            terms["training.repeats"] = repeats
        return terms


class LimitSettings(Settings):
    """Limits on what one client can do; see docs/robust.md."""

    trust: Literal["cooperative", "adversarial"] = "cooperative"
    """Whom the run trusts. `cooperative`: the arithmetic of the papers, with what clients announce. `adversarial`: the
    weight of an update and its norms are bounded by `cap_times_median` times what is typical, under every strategy."""
    receive_budget_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """Bytes of updates that may be on their way to the controller at one time, with the packets that are here of those
    that are not complete; one update is always let in. Updates in shared memory do not count: they are read in place,
    one at a time."""
    max_samples: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 30
    """Largest number of samples that an update may claim. One that claims more is refused."""
    cap_samples: Annotated[int, Field(ge=1, le=1 << 40)] | None = None
    """Largest number of samples that an update counts as, with either `trust`; with `adversarial` it takes the place of
    the bound by the median. null: no fixed number."""
    cap_times_median: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = 4.0
    """Multiple of the median that weight and norms of an update may have, with `trust` = `adversarial`."""
    clip_norm: Positive | None = None
    """L2 norm to which an update of the model with a larger norm is scaled down, with either `trust`; with
    `adversarial` it takes the place of the bound by the median. null: no fixed norm."""
    max_strikes: Annotated[int, Field(ge=0, le=1000)] = 3
    """Number of bad updates after which a client is put into quarantine. 0: never."""
    quarantine_rounds: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """Length of the quarantine, in rounds. 0: until the end of the run."""

    @model_validator(mode="before")
    @classmethod
    def _of_version_0_1(cls, given: Any) -> Any:
        """Read the default of version 0.1, where it was written down with all other settings, as the default of today.

        Raises:
            ValueError: a user has asked for it, and would get less than before.
        """
        if not isinstance(given, Mapping) or given.get("cap_samples") != "median":
            return given
        was_written_down = given.keys() >= _LIMITS_OF_0_1 and "trust" not in given
        if not was_written_down or given["cap_times_median"] != 4.0:
            raise ValueError(
                "cap_samples = median, the default of version 0.1, is gone: set limits.trust = adversarial, which "
                "bounds the norms of updates as well, and leave cap_samples out; or give a number of samples"
            )
        return {**given, "cap_samples": None}

    @property
    def limits_single_updates(self) -> bool:
        """Return whether each update is limited by itself, whatever the others are."""
        return self.clip_norm is not None or self.cap_samples is not None

    @property
    def is_adversarial(self) -> bool:
        """Whether any client may lie."""
        return self.trust == "adversarial"


TRUST_MEANS = {
    "cooperative": "what clients announce is believed",
    "adversarial": "weights and norms of updates are bounded by what is typical",
}
"""What `limits.trust` comes to, for people."""

_LIMITS_OF_0_1 = {
    "receive_budget_bytes", "max_samples", "cap_samples", "cap_times_median", "clip_norm", "max_strikes",
    "quarantine_rounds",
}  # fmt: skip


class EvaluationSettings(Settings):
    """Evaluation of the global model by the clients, on their own data; see docs/evaluation.md."""

    every: Annotated[int, Field(ge=0)] = 0
    """Number of rounds between two evaluations by clients; the last round is always evaluated. 0: never."""
    fraction: Fraction = 1.0
    """Share of the ready clients that evaluate, rounded up, drawn anew each time by the seed of the run."""
    count: Annotated[int, Field(ge=1, le=65_536)] | None = None
    """Number of clients that evaluate, in place of `fraction`; all that are ready if there are fewer."""
    least_answered: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Share of the asked clients that have to have found a metric, so that `early_stop` and `checkpoint.keep_best` go
    by it. Else the evaluation counts as none."""
    timeout_s: Duration = 60.0
    """Deadline of an evaluation, in seconds. What has not come by then is missing, and the run goes on."""
    maximize: Annotated[list[Annotated[str, Field(max_length=64)]], Field(max_length=32)] = Field(
        default=["accuracy", "auc", "f1", "iou", "precision", "r2", "recall"]
    )
    """Metrics of which a large value is good; of all others a small one is. It decides which clients are the worst, and
    what `early_stop` and `checkpoint.keep_best` take for better."""
    cross_site: bool = False
    """Whether at the end of the run each client's last local model is evaluated on each client's data. Only models of
    clients that agree, by `client.share_model`, are shown to others."""
    cross_site_models: Annotated[int, Field(ge=1, le=256)] = 32
    """Largest number of local models that are evaluated on the data of all, those of the clients with the lowest ids
    first."""

    @property
    def is_on(self) -> bool:
        """Whether clients evaluate anything."""
        return bool(self.every) or self.cross_site

    @model_validator(mode="after")
    def _consistent(self) -> EvaluationSettings:
        if self.count is not None and self.fraction != 1.0:
            raise ValueError("give fraction or count, not both")
        _need(self, "every", "fraction", "count", "least_answered")
        return self


class SecureAggregationSettings(Settings):
    """Sums without single updates: the controller learns the sum of its clients' updates, and none by itself; see
    docs/secure-aggregation.md."""

    enabled: bool = False
    """Whether clients mask their updates. With a strategy that needs their mean alone, such as fedavg, the codec fp32,
    q8, s4 or sq8, `clients.min` of 2 or more, and at most 255 clients in a round."""
    threshold: Annotated[float, Field(gt=0.5, le=1)] = 2 / 3
    """Share of the clients of a round whose keys came in time that have to stay until its end, `clients.min` of them at
    least: with fewer there is no sum. A lower one tolerates more that drop out. Where some clients work for the
    controller, the others are safe as long as these are less than twice this share less one: with 2/3, less than a
    third."""
    keys_timeout_s: Duration = 10.0
    """Seconds after the command of a round for which the keys of its clients are waited for. Who is late is not in its
    sum."""
    shares_timeout_s: Duration = 10.0
    """Seconds after that for which the shares are waited for that let the others take off the masks of a client that
    drops out. Clients train meanwhile."""
    unmask_timeout_s: Duration = 10.0
    """Seconds after the last masked update for which answers of `threshold` of the clients are waited for."""

    @property
    def exchange_s(self) -> float:
        """Seconds that keys and shares may take together."""
        return self.keys_timeout_s + self.shares_timeout_s


class EarlyStopSettings(Settings):
    """When a run ends before its last round."""

    patience: Annotated[int, Field(ge=1)] | None = None
    """Number of evaluations without an improvement after which the run ends, and its clients with it. null: never."""
    metric: MetricName = "eval_loss"
    """What is to improve: `eval_loss`, `accuracy`, or another metric of the task's evaluation, by its name; or one that
    the clients have found, such as `client.loss`, the mean, `client.loss.median`, which a few clients cannot move, or
    `client.loss.max`; see docs/evaluation.md."""
    mode: Literal["min", "max"] | None = None
    """Whether a small value of it is good, or a large one. null: a large one of those in `evaluation.maximize`."""
    min_delta: NonNegative = 0.0
    """By how much it has to be better to count as an improvement."""

    @model_validator(mode="after")
    def _consistent(self) -> EarlyStopSettings:
        _need(self, "patience", "metric", "mode", "min_delta")
        return self


class InitialCheckpointSettings(CheckpointSettings):
    """Checkpoints of the controller, and the model that a run begins with."""

    init_path: Path | None = None
    """Safetensors file with the initial weights: a checkpoint of gradbus, or the named tensors of the model."""
    keep_best: MetricName | None = None
    """Metric by which the best model so far is kept beside the newest ones, such as `eval_loss`, `accuracy` or
    `client.loss`; `gradbus export --best` writes it. null: none is kept."""
    best_mode: Literal["min", "max"] | None = None
    """Whether a small value of that metric is good, or a large one. null: a large one of those in
    `evaluation.maximize`."""

    @model_validator(mode="after")
    def _consistent(self) -> InitialCheckpointSettings:
        _need(self, "keep_best", "best_mode")
        return self


class RunHistorySettings(HistorySettings):
    """The event journal of the controller, for `gradbus check`."""

    payloads: bool = False
    """Whether the journal keeps the bytes of all updates and models, so that every round can be computed again. For
    small models."""


class FederatedConfig(Settings):
    """Settings of a federated run, for its controller."""

    renamed: ClassVar[Mapping[str, str]] = {
        "byzantine": "strategy.byzantine",
        "client_lr": "training.lr",
        "client_options": "training.rule",
        "client_rule": "training.rule",
        "clients_per_round": "selection.count",
        "codec_version": "codec.version",
        "fraction_evaluate": "evaluation.fraction",
        "fraction_fit": "selection.fraction",
        "history_dir": "history.dir",
        "history_payloads": "history.payloads",
        "keep_checkpoints": "checkpoint.keep",
        "krum_keep": "strategy.keep",
        "learning_rate": "training.lr",
        "local_epochs": "training.epochs",
        "local_steps": "training.steps",
        "min_available_clients": "clients.min",
        "min_clients": "clients.min",
        "min_fit_clients": "clients.min",
        "num_clients": "clients.num",
        "robust_budget_bytes": "strategy.budget_bytes",
        "proximal_mu": "training.rule.mu",
        "round_timeout": "round.timeout_s",
        "round_timeout_s": "round.timeout_s",
        "samples": "training.subset_size",
        "samples_per_round": "training.subset_size",
        "server_beta2": "strategy.beta2",
        "server_lr": "strategy.lr",
        "server_momentum": "strategy.momentum",
        "server_tau": "strategy.tau",
        "state_dir": "checkpoint.dir",
        "strategy_options": "strategy",
    }

    rounds: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Number of rounds in all, those before a resume included."""
    mode: Literal["synchronous", "asynchronous"] = "synchronous"
    """Whether clients wait for each other. `synchronous`: a round is one update of each client. `asynchronous`: a round
    is `asynchronous.buffer` updates, and each client takes the newest model when it is free."""
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Seed of all random choices of the run."""
    eval_every: Annotated[int, Field(ge=0)] = 1
    """Number of rounds between two evaluations; the last round is always evaluated. 0: never evaluate."""
    exchange: Literal["trained", "all"] = "trained"
    """What updates and models contain. `trained`: the parameters that require a gradient as the task builds the model,
    and buffers of floats; frozen ones are sent once, to clients whose own differ. `all`: every tensor of floats in
    every round. A complex number is a pair of floats."""
    share: ShareSettings = ShareSettings()
    buffers: Annotated[dict[Annotated[str, Field(min_length=1, max_length=200)], BufferRule], Field(max_length=33)] = (
        Field(default={})
    )
    """How buffers of integers and booleans are merged, by patterns of their names, of which the first that matches
    counts, such as `{"*.usage": "sum"}`. `max` or `any`: the largest value over the clients that count, of booleans
    whether any is true. `min` or `all`: the smallest. `sum`: what all have added. `median`: the one in the middle.
    `keep`: each client keeps its own. What no pattern matches has `max`; with a robust strategy `median`; with
    `privacy` or `secure_aggregation` `keep`. See docs/personal.md."""
    strategy: Annotated[Choice, STRATEGIES] = STRATEGIES.default
    """Aggregation of the updates, such as fedavg or fedadam, or, against hostile clients, median or krum, which hold
    all updates of a round in memory; docs/tuning.md lists all. Or your own, as package.module:Name."""
    privacy: Annotated[Choice, PRIVACY] = PRIVACY.default
    """Differential privacy of the clients, with the extra `gradbus[privacy]`. `central`: the controller adds noise to
    the sum of their updates. `local`: each client adds it to its own. See docs/privacy.md."""
    codec: Annotated[Choice, CODECS] = CODECS.default
    """Codec of the clients' updates; see docs/codecs.md. Or your own, as package.module:Name (docs/own-codec.md): each
    client has to name it in `client.codecs`, too, as a client imports nothing that the network names."""
    section_codec: Annotated[Choice, CODECS] = CODECS.default
    """Codec of what updates hold beside the model, such as the control variates of scaffold, of version 2. What a lossy
    one leaves out is sent later, as with `codec`."""
    downlink_codec: Annotated[Choice, CODECS] = CODECS.default
    """Codec of the global model on its way to the clients, of version 2. A lossy one sends differences."""
    selection: Annotated[Choice, SELECTORS] = SELECTORS.default
    """Who takes part in a round, such as uniform with a `fraction` of the clients; see docs/selection.md. Or your own,
    as package.module:Name."""
    clients: ClientsSettings = ClientsSettings()
    round: RoundSettings = RoundSettings()
    asynchronous: AsynchronousSettings = AsynchronousSettings()
    training: TrainingSettings = TrainingSettings()
    limits: LimitSettings = LimitSettings()
    evaluation: EvaluationSettings = EvaluationSettings()
    secure_aggregation: SecureAggregationSettings = SecureAggregationSettings()
    early_stop: EarlyStopSettings = EarlyStopSettings()
    callbacks: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=64)] = ()
    """Classes as package.module:Name, whose objects the controller calls at updates, models, evaluations and rounds;
    see docs/training.md."""
    checkpoint: InitialCheckpointSettings = InitialCheckpointSettings()
    history: RunHistorySettings = RunHistorySettings()

    @model_validator(mode="after")
    def _consistent(self) -> FederatedConfig:
        for key, codec in (("downlink_codec", self.downlink_codec), ("section_codec", self.section_codec)):
            if codec.options.get("version", 2) != 2:
                raise ValueError(f"{key}.version must be 2: the first one cannot hold differences of every codec")
        self._check_mode()
        density = self.training.given_from("density")
        if density and ":" not in self.codec.name and "density" not in CODECS.options_of(self.codec.name).model_fields:
            having = [name for name in CODECS.table if "density" in CODECS.options_of(name).model_fields]
            raise ValueError(
                f"training.from_round: density is that of a sparse codec, and codec is {self.codec.name}. Set codec to "
                f"{' or '.join(having)}, or leave density out"
            )
        stop, best = self.early_stop, self.checkpoint
        if stop.patience is not None:
            self._check_metric("early_stop.patience", stop.metric)
        if best.keep_best is not None:
            self._check_metric("checkpoint.keep_best", best.keep_best)
        if self.clients.kind == "sites":
            single = {"clip_norm": self.limits.clip_norm, "cap_samples": self.limits.cap_samples}
            for key, value in single.items():
                if value is not None:
                    raise ValueError(
                        f"limits.{key} limits one update, and with clients.kind = sites this Controller sees sums "
                        f"alone: set it at the sites, whose clients it is for"
                    )
        return self

    def sent_options(self) -> dict[str, Any]:
        """Return what clients are sent of `training` with their Welcome."""
        terms = self.training.sent_terms(self.mode, self.asynchronous.repeats)
        return {**self.training.sent_options(), **terms}

    @property
    def longest_codec(self) -> Choice:
        """The codec of the updates with the largest density of all rounds, of which no update is longer. Raises
        ConfigError: it has none."""
        given = self.training.given_from("density")
        if not given:
            return self.codec
        options = CODECS.options(self.codec)
        if "density" not in options:  # of a codec of the user's, whose options are not known before
            raise ConfigError(
                f"federated.training.from_round has a density, and the codec {self.codec.name} has no such option: "
                f"leave it out"
            )
        density = max(options["density"], *given)
        return Choice.model_validate({**self.codec.model_dump(), "density": density})

    def mode_of(self, metric: str, mode: Literal["min", "max"] | None) -> Literal["min", "max"]:
        """Whether a small value of a metric is good, or a large one; ``mode``: what its setting says."""
        name, over_clients = split_metric(metric)
        return mode or ("max" if name in self.evaluation.maximize and over_clients != "std" else "min")

    def _check_metric(self, key: str, metric: str) -> None:
        """Raises ValueError: the evaluation that finds the metric never happens."""
        if metric.startswith(OF_CLIENTS):
            if not self.evaluation.every:
                raise ValueError(f"{key} needs evaluations by clients for {metric}: set evaluation.every to 1 or more")
        elif not self.eval_every:
            raise ValueError(f"{key} needs evaluations: set eval_every to 1 or more")

    def _check_mode(self) -> None:
        """Raises ValueError: a setting that has no meaning in this mode."""
        own = self.asynchronous
        if self.mode == "synchronous":
            # A configuration that was written down has every setting, with its default.
            changed = sorted(own.model_dump(exclude_defaults=True))
            if changed:
                raise ValueError(f"asynchronous.{changed[0]} needs mode = asynchronous")
            return
        if self.clients.kind == "sites":
            raise ValueError(
                "mode = asynchronous takes updates of clients: the sum of a site is of one round, and cannot be "
                "brought to a newer model. Use mode = synchronous in trees"
            )
        if self.round.timeout_times_median is not None:
            raise ValueError(
                "round.timeout_times_median is of synchronous rounds: leave it out, or use mode=synchronous"
            )
        if self.round.quorum < 1:
            raise ValueError("round.quorum is of synchronous rounds: with mode = asynchronous set asynchronous.buffer")
        if own.buffer < self.clients.min:
            raise ValueError(
                f"asynchronous.buffer ({own.buffer}) is less than clients.min ({self.clients.min}), the least number "
                f"of updates that make a round"
            )
        if own.proportional_steps and not self.training.steps:
            raise ValueError("asynchronous.proportional_steps needs rounds in steps: set training.steps")
        if own.proportional_steps and any(
            key in one for one in self.training.from_round.values() for key in ("steps", "epochs")
        ):
            raise ValueError(
                "asynchronous.proportional_steps gives each client steps of its own, up to training.steps: leave steps "
                "and epochs out of training.from_round"
            )
        if not own.repeats and self.clients.num is not None and own.buffer > self.clients.num:
            raise ValueError(
                f"asynchronous.buffer ({own.buffer}) is never full: without asynchronous.repeats each of the "
                f"{self.clients.num} clients counts once in it"
            )


class UpstreamConfig(Settings):
    """How the Controller of a site takes part in the run of the level above it; see docs/trees.md."""

    site: Annotated[int, Field(ge=0, lt=0x7FFF_FFFF)] | None = None
    """Number of this site among those of the level above, each of which has its own. null: there is no level above, and
    the other settings of this section are without effect."""
    name: Annotated[str, Field(max_length=64)] = ""
    """Name of this site, which the level above shows next to its number: letters, digits and `. _ -`. Empty: none."""
    deadline_share: Fraction = 0.8
    """Share of the deadline of the level above after which a round of this site ends, as `federated.round.timeout_s`,
    which may be shorter, but not longer. The rest is for the way of its sum."""
    timeout_s: Duration = 600.0
    """Silence of the level above, in seconds, after which the site gives up: at its start, and without `alone`."""
    alone: bool = True
    """Whether a site that is cut off from the level above goes on with rounds of its own."""
    alone_after_s: Duration = 30.0
    """Silence of the level above, in seconds, after which a site counts as cut off."""
    codecs: OwnCodecs = ()
    """Codecs of your own, as package.module:Name, that the level above may choose for the clients of this site, each of
    which names them in `client.codecs`, too. Empty: the built-in ones only."""
    rejoin: Literal["drop", "contribute"] = "drop"
    """What becomes of the rounds that a site did alone when the level above is back; they are kept on the disk in any
    case. `drop`: nothing. `contribute`: what they changed is one more update in the next sum of the site, with the
    samples of the last of them."""


class BudgetSettings(Settings):
    """How much of its machine the training of a client may take; see docs/embedding.md."""

    core_share: Annotated[float, Field(gt=0, le=1024, allow_inf_nan=False)] | None = None
    """Share of a core: seconds of processor time a second that training takes, over any 10 seconds, on all of its
    threads together. Training pauses between batches. null: no limit."""
    cores: Annotated[tuple[Annotated[int, Field(ge=0, lt=4096)], ...], Field(max_length=1024)] = ()
    """Numbers of the logical processors that training runs on, such as `[2, 3]`. Other threads of the process stay
    where they are. Empty: any."""
    seconds_per_round: Duration | None = None
    """Seconds that training takes in a round, pauses included. Then it stops between two batches, and the update of the
    batches that are done is sent. null: no limit."""

    @property
    def is_set(self) -> bool:
        """Whether anything is limited."""
        return self != type(self)()


class ClientConfig(Settings):
    """Settings of a federated client. The rules of the run come from its controller."""

    renamed: ClassVar[Mapping[str, str]] = {"history_dir": "history.dir"}

    state_dir: Path | None = None
    """Directory that keeps over a restart what this client keeps from round to round: its personal tensors, the
    residual of a lossy codec, the state of its rule and of its optimizer, and what was released with local privacy.
    null: in memory only."""
    rule: Annotated[str, Field(max_length=256)] = ""
    """Training rule of your own, as package.module:Name, that a controller may choose for this client. Empty: none."""
    codecs: OwnCodecs = ()
    """Codecs of your own, as package.module:Name, that a controller may choose for updates and models of this client.
    Empty: the built-in ones only."""
    keep_personal: Patterns = ()
    """Patterns of tensor names, such as `["head.*"]`, that this client keeps at home: a controller whose
    `federated.share` would share one of them gets nothing. A pattern that matches no tensor is refused. Empty: the
    controller decides."""
    least_noise: NonNegative = 0.0
    """Least noise, as a multiple of the sensitivity, that this client adds to each of its updates: a controller that
    asks for less, with `federated.privacy` = `local`, or for none, gets none of them. 0: the controller decides."""
    least_members: Annotated[int, Field(ge=0, le=255)] = 0
    """Least number of clients whose sum hides an update of this one: with a controller that masks none, it takes no
    part at all, and with `federated.secure_aggregation` in no attempt of which the sum of fewer could be had, by itself
    or with the sums of other attempts at the round. 0: the controller decides, and no sum is of one client."""
    controller_timeout_s: Duration = 600.0
    """Silence of the controller, in seconds, after which the client gives up."""
    share_model: bool = False
    """Whether the model that this client's last training has made may be shown to the other clients, for
    `federated.evaluation.cross_site`. false: the controller gets the reason, and no model."""
    evaluates: bool = True
    """Whether this client evaluates models on its own data when a controller asks for that, with
    `federated.evaluation`. false: the controller gets the reason, and no numbers."""
    report_failures: bool = True
    """Whether the traceback of a failed training function is sent to the controller."""
    full_traceback: bool = False
    """Whether tracebacks show all lines, also those of gradbus and torch."""
    budget: BudgetSettings = BudgetSettings()
    callbacks: Annotated[tuple[Annotated[str, Field(max_length=256)], ...], Field(max_length=64)] = ()
    """Classes as package.module:Name, whose objects the client calls at rounds, and for each global model; see
    docs/embedding.md."""
    history: HistorySettings = HistorySettings()
