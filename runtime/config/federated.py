"""Settings, checked once, with the unit in the name. Errors name the key and the nearest right one."""

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

from gradbus.runtime.config.job_name import default_job, with_user
from gradbus.runtime.errors import ConfigError
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
    """Makes settings of keywords in a program, where what is wrong with them is told in the same words as of a file."""

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
    """Base: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class BusSettings(Settings):
    """How to reach the others. See :func:`gradbus.connect`, and docs/security.md for what protects it. In the name of a
    job, ``{user}`` stands for who runs this process."""

    job: Annotated[str, AfterValidator(with_user)] = Field(default_factory=default_job)
    domain: Annotated[int, Field(ge=0, le=232)] = 0
    network: Literal["loopback", "network"] = "loopback"
    interface: str = "lo"
    peers: tuple[str, ...] = ()
    multicast: bool = False
    lease_s: Positive | None = None
    stall_timeout_s: Positive = 30.0
    shared_memory: bool = True
    security: Literal["user", "none", "psk", "identity"] = "user"
    key_file: Path | None = None
    controller_key: str = ""
    allow_file: Path | None = None
    insecure: bool = False
    faults: str = ""


class FederatedConfig(Settings):
    """Rules of a federated run, for its controller.

    Attributes:
        rounds: rounds in all, those before a resume included.
        num_clients: clients that are expected; None: nobody knows, start with ``min_clients``.
        min_clients: updates that suffice when the deadline has passed; also the least to start with.
        quorum: share of the expected clients whose updates suffice before the deadline, once ``grace_s`` has passed
            since they came. 1: wait for all that live.
        grace_s: how long the others may still take after the quorum.
        start_timeout_s: the run fails when ``min_clients`` are not there after so long.
        start_grace_s: with enough but not all expected clients there, wait so much longer for the rest.
        round_timeout_s: deadline of a round, from its command.
        max_attempts: a round with too few updates is tried so often.
        heartbeat_s: how often controller and clients say that they live.
        dead_after_s: a client that lives, does not train, and says nothing for so long hangs: it is not waited for
            until it is heard again. That a process is dead is told by the kernel, or by DDS when the lease ends. One
            that trains may be silent for as long as ``round_timeout_s``.
        subset_size: samples a client trains on in a round; 0: all of its own.
        epochs: passes over them. lr: learning rate of the clients. seed: of everything random.
        codec: of the clients' updates. density: share of values kept by s4 and sq8. chunk_elems: values that share a
            scale in q8 and sq8. codec_version: 2, or 1 for the original bytes.
        downlink_codec: of the global model on its way to the clients; a lossy one sends differences.
        exchange: what updates and models hold: ``trained``: the parameters that require a gradient as build_model gives
            them, and floating-point buffers; frozen ones are sent once, to clients whose own are others. ``all``: every
            floating-point tensor, in every round.
        strategy: server optimizer: fedavg, fedavgm, fedadam; or, against hostile clients, median, trimmed_mean, krum,
            multi_krum, which hold all updates of a round in memory; see gradbus.actors.aggregation.robust.
            Your own as package.module:Name. strategy_options: the options of your own.
        client_rule: how clients train: plain, or your own as package.module:Name, which each client has to name as
            ``client.rule`` as well: nothing that comes from the wire is imported. client_options: its options, which
            go to the clients.
        byzantine: how many of the clients of a round these shall bear; it decides the least ``min_clients``.
        krum_keep: updates that multi_krum averages; None: as many as it may.
        robust_budget_bytes: memory that these may take for the updates of a round.
        server_lr, server_momentum, server_beta2, server_tau: its constants; see gradbus.actors.aggregation.strategies.
        state_dir: where checkpoints go; None: none are made. keep_checkpoints: how many.
        resume: continue from the newest checkpoint in ``state_dir``, if there is one.
        init_path: safetensors file with the initial weights: one of our checkpoints, or the named tensors of the model.
        eval_every: evaluate after every so many rounds, and after the last; 0: never.
        receive_budget_bytes: updates on their way in at one time, together; one is always let in. Updates that lie in
            the memory of clients on the same machine are not on their way: they are read there, one at a time.
        max_samples: an update that says it is of more samples is refused, as a lie.
        cap_samples: an update of more samples counts as one of so many. ``"median"``: as one of ``cap_times_median``
            times the median of what the clients have announced; see sample_cap.py. None: samples are taken
            as they are announced, and one client may decide the model by a lie.
        cap_times_median: how many typical clients one may weigh at most, with ``cap_samples="median"``.
        clip_norm: an update whose L2 norm is larger is scaled down to it; None: none is.
        max_strikes: a client with so many bad updates is kept out; 0: none is.
        quarantine_rounds: for so many rounds; 0: for good.
        history_dir: where what happened is noted, for ``gradbus check``; see testing/journal.py. None:
            nowhere. history_payloads: keep the bytes of all updates and models as well, so that every round can be
            computed again; for small models.
    """

    rounds: Annotated[int, Field(ge=1, le=1_000_000)] = 10
    num_clients: Annotated[int, Field(ge=1, le=100_000)] | None = None
    min_clients: Annotated[int, Field(ge=1)] = 1
    quorum: Fraction = 1.0
    grace_s: NonNegative = 5.0
    start_timeout_s: Positive = 120.0
    start_grace_s: NonNegative = 10.0
    round_timeout_s: Positive = 300.0
    max_attempts: Annotated[int, Field(ge=1)] = 3
    heartbeat_s: Positive = 0.5
    dead_after_s: Positive = 30.0
    subset_size: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    epochs: Annotated[int, Field(ge=1, le=0x7FFF_FFFF)] = 1
    lr: Positive = 0.01
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    codec: CodecName = "fp32"
    density: Fraction = 0.1
    chunk_elems: Annotated[int, Field(ge=1, le=1 << 30)] = 8192
    codec_version: Literal[1, 2] = 2
    downlink_codec: CodecName = "fp32"
    exchange: Literal["trained", "all"] = "trained"
    strategy: Annotated[str, Field(min_length=1, max_length=256)] = "fedavg"
    strategy_options: dict[str, Any] = Field(default_factory=dict)
    client_rule: Annotated[str, Field(min_length=1, max_length=256)] = "plain"
    client_options: ClientOptions = Field(default_factory=dict)
    byzantine: Annotated[int, Field(ge=0, le=100_000)] = 1
    krum_keep: Annotated[int, Field(ge=1, le=100_000)] | None = None
    robust_budget_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    server_lr: Positive = 1.0
    server_momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    server_beta2: Annotated[float, Field(ge=0, lt=1)] = 0.99
    server_tau: Positive = 1e-3
    state_dir: Path | None = None
    keep_checkpoints: Annotated[int, Field(ge=1)] = 3
    resume: bool = True
    init_path: Path | None = None
    eval_every: Annotated[int, Field(ge=0)] = 1
    receive_budget_bytes: Annotated[int, Field(ge=1)] = 64 << 20
    max_samples: Annotated[int, Field(ge=1, le=1 << 40)] = 1 << 30
    cap_samples: Annotated[int, Field(ge=1, le=1 << 40)] | Literal["median"] | None = "median"
    cap_times_median: Annotated[float, Field(ge=1, le=1e6, allow_inf_nan=False)] = 4.0
    clip_norm: Positive | None = None
    max_strikes: Annotated[int, Field(ge=0, le=1000)] = 3
    quarantine_rounds: Annotated[int, Field(ge=0, le=1_000_000)] = 10
    history_dir: Path | None = None
    history_payloads: bool = False

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
    """Settings of a client; the rules of the run come from its controller.

    Attributes:
        state_dir: where the residual of a lossy codec is kept over a restart; None: in memory only.
        controller_timeout_s: give up when no controller has been heard for so long.
        report_failures: send the traceback of a failed training function to the controller.
        full_traceback: show and send all lines of it, also those of gradbus and torch.
        history_dir: where what happened is noted, for ``gradbus check``; None: nowhere.
        rule: a training rule of your own, as package.module:Name, that a controller may choose for this client.
    """

    state_dir: Path | None = None
    rule: Annotated[str, Field(max_length=256)] = ""
    controller_timeout_s: Positive = 600.0
    report_failures: bool = True
    full_traceback: bool = False
    history_dir: Path | None = None


_MAX_FAULTS = 20  # that are told; to look for the nearest right key takes its time
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
        values: what the program itself gives.

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
    """The values as settings. Raises ConfigError in words that a person understands."""
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
    """Deeper than what can be written down again, or told of in an error."""
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
    """As much as a person reads."""
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 3] + "..."


def _known_keys(kind: type[BaseModel], location: list[str]) -> list[str]:
    model: Any = kind
    for step in location:
        field = model.model_fields.get(step) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = field.annotation if field is not None else None
    return list(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def read_settings(path: Path) -> dict[str, Any]:
    """The sections of a JSON or TOML file, unchecked. Raises ConfigError: it cannot be read, or is neither."""
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
