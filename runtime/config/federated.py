"""Settings of buses and federated runs, checked once, with the unit in the name; reading of configuration files.

Errors name the wrong key and the nearest right one.
"""

from __future__ import annotations

import copy
import difflib
import os
import reprlib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from gradbus.runtime.config.job_name import USER, with_user
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.fast_paths import LOOPBACK
from gradbus.runtime.json_text import parse_json, read_text
from gradbus.runtime.misuse import WrongKeyword

MAX_FILE_BYTES = 256 << 10  # of a configuration
MAX_FILE_MEMORY = 32 << 20  # that reading one may take: tables within tables take most

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(gt=0, le=1)]
ClientOptions = Annotated[
    dict[Annotated[str, Field(max_length=64)], bool | int | float | Annotated[str, Field(max_length=256)]],
    Field(max_length=32),
]
CodecName = Literal["fp32", "q8", "s4", "sq8"]


if TYPE_CHECKING:  # pydantic has no public name for it
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


class _Explained(ModelMetaclass):
    """Checks settings that a program gives by keyword, with the same error texts as those of a file."""

    def __call__(cls: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - of a metaclass
        if args:
            example = next(iter(cls.model_fields), "name")
            raise WrongKeyword(f"{cls.__name__} takes keywords alone, as in {cls.__name__}({example}=...)")
        try:
            return super().__call__(**kwargs)
        except ValidationError as error:
            faults = error.errors(include_url=False, include_context=False)
            kind = WrongKeyword if any(fault["type"] == "extra_forbidden" for fault in faults) else ConfigError
            raise kind(f"{cls.__name__}: {_explain_all(cls, faults)}") from None


class Settings(BaseModel, metaclass=_Explained):
    """Base of all settings: frozen; an unknown key is an error; the text below a field is its description."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=(), use_attribute_docstrings=True)


class BusSettings(Settings):
    """How to reach the other processes of a job; see :func:`gradbus.connect`, and docs/security.md for what protects
    it."""

    job: Annotated[str, AfterValidator(with_user)] = Field(default=f"default-{USER}", validate_default=True)
    """Name of the job. Only processes with the same job and domain see each other. `{user}` stands for the name of the
    user who runs this process."""
    domain: Annotated[int, Field(ge=0, le=232)] = 0
    """Number of the DDS domain. It decides the UDP ports."""
    network: Literal["loopback", "network"] = "loopback"
    """Network profile: `loopback` for one machine, `network` for several, with packets that fit an Ethernet frame."""
    interface: str = LOOPBACK
    """Name of the network interface that leads to the others. With `lo`, nothing leaves this machine."""
    peers: tuple[str, ...] = ()
    """Addresses of the other machines, for discovery without multicast."""
    multicast: bool = False
    """Whether discovery and data use multicast."""
    lease_s: Positive | None = None
    """Silence, in seconds, after which a process on another machine counts as dead. null: 60 with the profile
    `loopback`, 10 with `network`."""
    stall_timeout_s: Positive = 30.0
    """Seconds for which a reader may take no data before sending to it is an error."""
    shared_memory: bool = True
    """Whether processes of one machine pass large data through memory that they share."""
    security: Literal["user", "none", "psk", "identity"] = "user"
    """What protects the data. `user`: encryption with the key that the process is given, else with that of its user,
    which is for one machine. `psk`: encryption with the key of the job, which must be given. `identity`: each node has
    a key of its own. `none`: no protection. See docs/security.md."""
    key_file: Path | None = None
    """File of the key: that of the job, or with `identity` that of this node. null: the file that the environment
    variable GRADBUS_KEY_FILE names."""
    controller_key: str = ""
    """With `identity`, the public key that the controller, or rank 0, must have."""
    allow_file: Path | None = None
    """With `identity`, at the controller or rank 0, the file that lists the nodes that may take part."""
    insecure: bool = False
    """Whether unprotected data may leave this machine."""
    faults: str = ""
    """Faults to inject into what this process sends, for tests; see docs/reliability.md. Empty: none."""


class FederatedConfig(Settings):
    """Settings of a federated run, for its controller."""

    rounds: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    """Number of rounds in all, those before a resume included."""
    num_clients: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of clients that are expected. null: unknown; the run starts with `min_clients`."""
    min_clients: Annotated[int, Field(ge=1)] = 1
    """Least number of updates that make a round once its deadline has passed, and least number of clients to start
    with."""
    quorum: Fraction = 1.0
    """Share of the expected clients whose updates suffice before the deadline, once `grace_s` has passed since they
    arrived. 1: wait for all clients that are alive."""
    grace_s: NonNegative = 5.0
    """Seconds that the other clients may still take after the quorum."""
    start_timeout_s: Positive = 120.0
    """Seconds after which the run fails if there are fewer than `min_clients`."""
    start_grace_s: NonNegative = 10.0
    """Seconds to wait for the remaining expected clients once there are `min_clients`."""
    round_timeout_s: Positive = 300.0
    """Deadline of a round, in seconds after its command."""
    max_attempts: Annotated[int, Field(ge=1)] = 3
    """How often a round is tried that ends with too few updates."""
    heartbeat_s: Positive = 0.5
    """Seconds between two heartbeats of the controller and of each client."""
    dead_after_s: Positive = 30.0
    """Silence, in seconds, after which a client that does not train counts as hanging: rounds do not wait for it until
    its next message. The end of a process is noticed without it, by the kernel or by the DDS lease, and a client that
    trains may be silent for `round_timeout_s`. At least 3 x `heartbeat_s`."""
    subset_size: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Number of samples that a client trains on in a round. 0: all of its own."""
    epochs: Annotated[int, Field(ge=1, le=0x7FFF_FFFF)] = 1
    """Number of passes of a client over its samples in a round."""
    lr: Positive = 0.01
    """Learning rate of the clients."""
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Seed of all random choices of the run."""
    codec: CodecName = "fp32"
    """Codec of the clients' updates; see docs/codecs.md."""
    density: Fraction = 0.1
    """Share of the values that `s4` and `sq8` keep."""
    chunk_elems: Annotated[int, Field(ge=1, le=1 << 30)] = 8192
    """Number of values that share a scale in `q8` and `sq8`."""
    codec_version: Literal[1, 2] = 2
    """Version of the codecs' format. 1: the original bytes."""
    downlink_codec: CodecName = "fp32"
    """Codec of the global model on its way to the clients. A lossy one sends differences."""
    exchange: Literal["trained", "all"] = "trained"
    """What updates and models contain. `trained`: the parameters that require a gradient as the task builds the model,
    and floating-point buffers; frozen ones are sent once, to clients whose own differ. `all`: every floating-point
    tensor in every round."""
    strategy: Annotated[str, Field(min_length=1, max_length=256)] = "fedavg"
    """Aggregation of the updates, such as fedavg or fedadam, or, against hostile clients, median or krum, which hold
    all updates of a round in memory; docs/tuning.md lists all. Or your own, as package.module:Name."""
    strategy_options: dict[str, Any] = Field(default={})
    """Options of a strategy of your own."""
    client_rule: Annotated[str, Field(min_length=1, max_length=256)] = "plain"
    """How clients train, such as plain; docs/tuning.md lists all. Or your own, as package.module:Name: each client has
    to name it as `client.rule`, too, as a client imports nothing that the network names."""
    client_options: ClientOptions = Field(default={})
    """Options of the client rule. The controller sends them to the clients."""
    byzantine: Annotated[int, Field(ge=0, le=100_000)] = 1
    """Number of hostile clients in a round that the robust strategies tolerate. It decides the least `min_clients`."""
    krum_keep: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Number of updates that multi_krum averages. null: as many as it may."""
    robust_budget_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    """Memory, in bytes, that the robust strategies may take for the updates of a round."""
    server_lr: Positive = 1.0
    """Learning rate of the server, for fedavgm and fedadam."""
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum of the server, for fedavgm; beta1 of fedadam."""
    server_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    """Decay of the second moment (beta2), for fedadam."""
    server_tau: Positive = 1e-3
    """Constant that fedadam adds to the denominator (tau)."""
    state_dir: Path | None = None
    """Directory of the checkpoints. null: `gradbus controller` uses one in the run directory; a program of your own
    makes none."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    """Number of checkpoints to keep."""
    resume: bool = True
    """Whether to continue from the newest checkpoint in `state_dir`, if there is one."""
    init_path: Path | None = None
    """Safetensors file with the initial weights: a checkpoint of gradbus, or the named tensors of the model."""
    eval_every: Annotated[int, Field(ge=0)] = 1
    """Number of rounds between two evaluations; the last round is always evaluated. 0: never evaluate."""
    receive_budget_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    """Bytes of updates that may be on their way to the controller at one time; one update is always let in. Updates in
    shared memory do not count: they are read in place, one at a time."""
    max_samples: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 30
    """Largest number of samples that an update may claim. One that claims more is refused."""
    cap_samples: Annotated[int, Field(ge=1, le=1 << 40)] | Literal["median"] | None = "median"
    """Largest number of samples that an update counts as. `median`: `cap_times_median` times the median of the
    announced numbers. null: no limit, and one client may decide the model with a false number."""
    cap_times_median: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = 4.0
    """Number of typical clients that one client may weigh at most, with `cap_samples` = `median`."""
    clip_norm: Positive | None = None
    """L2 norm to which an update with a larger norm is scaled down. null: no clipping."""
    max_strikes: Annotated[int, Field(ge=0, le=1000)] = 3
    """Number of bad updates after which a client is put into quarantine. 0: never."""
    quarantine_rounds: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    """Length of the quarantine, in rounds. 0: until the end of the run."""
    history_dir: Path | None = None
    """Directory of the event journal, for `gradbus check`. null: no journal; `gradbus controller` keeps one in the run
    directory."""
    history_payloads: bool = False
    """Whether the journal keeps the bytes of all updates and models, so that every round can be computed again. For
    small models."""

    @model_validator(mode="after")
    def _consistent(self) -> FederatedConfig:
        if self.num_clients is not None and self.min_clients > self.num_clients:
            raise ValueError(f"min_clients ({self.min_clients}) is more than num_clients ({self.num_clients})")
        if self.dead_after_s < 3 * self.heartbeat_s:
            raise ValueError(
                f"dead_after_s ({self.dead_after_s:g}) must be at least 3 x heartbeat_s ({self.heartbeat_s:g}): "
                f"one late heartbeat is not a death"
            )
        return self


class ClientConfig(Settings):
    """Settings of a federated client. The rules of the run come from its controller."""

    state_dir: Path | None = None
    """Directory that keeps the residual of a lossy codec over a restart. null: in memory only."""
    rule: Annotated[str, Field(max_length=256)] = ""
    """Training rule of your own, as package.module:Name, that a controller may choose for this client. Empty: none."""
    controller_timeout_s: Positive = 600.0
    """Silence of the controller, in seconds, after which the client gives up."""
    report_failures: bool = True
    """Whether the traceback of a failed training function is sent to the controller."""
    full_traceback: bool = False
    """Whether tracebacks show all lines, also those of gradbus and torch."""
    history_dir: Path | None = None
    """Directory of the event journal, for `gradbus check`. null: no journal."""


_MAX_FAULTS = 20  # in one error text; the search for the nearest right key takes time
_MAX_TEXT = 200
_MAX_DEPTH = 32
_SHORT = reprlib.Repr()  # of values: no deeper, no longer than a person reads
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MAX_TEXT

S = TypeVar("S", bound=BaseModel)


def load_settings(
    kind: type[S],
    path: Path | None = None,
    *,
    overrides: Iterable[str] = (),
    environment: Mapping[str, str] | None = None,
    values: Mapping[str, Any] | None = None,
) -> S:
    """Settings from, weak to strong: ``values``, a JSON or TOML file, the environment, ``overrides``.

    Args:
        kind: the model to fill.
        path: a ``.json`` or ``.toml`` file.
        overrides: ``section.key=value``; the value is JSON, or text if it is not.
        environment: ``GRADBUS_SECTION__KEY=value``; by default the process's own.
        values: the defaults of the program.

    Raises:
        ConfigError: with every wrong key, what was expected, and the nearest right key.
    """
    merged: dict[str, Any] = copy.deepcopy(dict(values or {}))
    where = "settings"
    if path is not None:
        where = str(path)
        _merge(merged, read_settings(path))
    environment = os.environ if environment is None else environment
    for name, text in sorted(environment.items()):
        if name.startswith("GRADBUS_") and "__" in name:
            _put(merged, name.removeprefix("GRADBUS_").lower().split("__"), text)
    for item in overrides:
        key, sign, text = item.partition("=")
        if not sign or not key:
            raise ConfigError(f"--set {_short(item)!r}: expected section.key=value, for example federated.rounds=20")
        _put(merged, key.strip().split("."), text)
    return check_settings(kind, merged, where=where)


def check_settings(kind: type[S], values: Mapping[str, Any], *, where: str) -> S:
    """Check the values and return them as settings. Raises ConfigError: some are wrong; its text names each."""
    if _is_deep(values):
        raise ConfigError(f"{where}: sections and lists are nested more than {_MAX_DEPTH} deep")
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False)
        raise ConfigError(f"{where}: {_explain_all(kind, faults)}") from None


def _explain_all(kind: type[BaseModel], faults: Sequence[Any]) -> str:
    lines = [_explain(kind, fault) for fault in faults[:_MAX_FAULTS]]
    lines += [f"and {len(faults) - _MAX_FAULTS} more"] * (len(faults) > _MAX_FAULTS)
    return "; ".join(lines)


def _explain(kind: type[BaseModel], fault: Any) -> str:
    location = [_short(str(step)) for step in fault["loc"]]
    name = ".".join(location) or "settings"
    if fault["type"] == "extra_forbidden":
        known = _known_keys(kind, location[:-1])
        inside = [key for key in known if location[-1] in _known_keys(kind, [*location[:-1], key])]
        if len(inside) == 1:  # the key is right, its section was left out
            return f"unknown key {name!r}, did you mean {'.'.join([*location[:-1], inside[0], location[-1]])!r}?"
        near = difflib.get_close_matches(location[-1], known, n=1, cutoff=0.5)
        hint = f", did you mean {near[0]!r}?" if near else f"; known here: {', '.join(sorted(known))}"
        return f"unknown key {name!r}{hint}"
    if fault["type"] == "missing":
        return f"key {name!r} is missing"
    message: str = fault["msg"].removeprefix("Value error, ")
    if not location:
        return message
    over_a_section = isinstance(fault["input"], Mapping)
    found = "" if over_a_section else f", got {_shown(fault['input'])}"
    return f"{name}: {message[:1].lower()}{message[1:]}{found}"


def _is_deep(values: Mapping[str, Any]) -> bool:
    """Whether the values are nested deeper than JSON and error texts can show."""
    level: list[Any] = [values]
    for _ in range(_MAX_DEPTH):
        level = [
            inner
            for value in level
            for inner in (value.values() if isinstance(value, Mapping) else value)
            if isinstance(inner, Mapping | list | tuple)
        ]
    return bool(level)


def _shown(value: Any) -> str:
    try:
        return _SHORT.repr(value)
    except ValueError:  # a number of thousands of digits, which TOML can have as 0x...
        return f"a {type(value).__name__} that is too long to be shown"


def _short(text: str) -> str:
    """Cut a text to a readable length."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def _known_keys(kind: type[BaseModel], location: list[str]) -> list[str]:
    model: Any = kind
    for step in location:
        field = model.model_fields.get(step) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field is not None else None
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def read_settings(path: Path) -> dict[str, Any]:
    """Read the sections of a JSON or TOML file, unchecked. Raises ConfigError: it cannot be read, or is neither."""
    try:
        text = read_text(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"configuration {path} is not a UTF-8 text file") from None
    except ValueError as error:
        raise ConfigError(f"configuration {path} is no configuration: it has {error}") from None
    try:
        loaded = tomllib.loads(text) if path.suffix == ".toml" else parse_json(text)
    except (ValueError, RecursionError) as error:  # both decoders' errors are ValueErrors
        raise ConfigError(
            f"configuration {path} is not valid {'TOML' if path.suffix == '.toml' else 'JSON'}: {error}"
        ) from None
    if not isinstance(loaded, dict):
        raise ConfigError(f"configuration {path}: expected an object with sections, got {type(loaded).__name__}")
    return loaded


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _put(values: dict[str, Any], path: list[str], text: str) -> None:
    try:
        value = parse_json(text)
    except ValueError:
        value = text
    for step in path[:-1]:
        inner = values.setdefault(step, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{_short('.'.join(path))}: {_short(step)!r} is not a section")
        values = inner
    values[path[-1]] = value
