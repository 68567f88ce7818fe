"""The codecs of a run: those that its controller chooses, and of these the ones that a client takes.

A codec of one's own is a class that a configuration names as ``package.module:Name``. A controller imports what its own
configuration names; a client, or a site, imports nothing that the controller names unless its own configuration names
it, too (``client.codecs``, ``upstream.codecs``). Messages of such a codec are read where it is named, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gradbus.codecs import Codec
from gradbus.codecs.registry import check_magics
from gradbus.runtime.choices import CODECS, Choice
from gradbus.runtime.config.federated import FederatedConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import Welcome

DENSITY = "density"
CLIENT_SETTING = "client.codecs"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunCodecs:
    """The codecs that a controller's configuration names, made once.

    Attributes:
        update: of the updates. section: of what they hold beside the model. downlink: of the models.
        longest: that of the updates with the options of which no update is longer.
        update_options, section_options: all options of these two as JSON text, as they are sent to clients.
        own: the classes of those that are not built in.
    """

    update: Codec
    section: Codec
    downlink: Codec
    longest: Codec
    update_options: str
    section_options: str
    own: tuple[type[Codec], ...]


def make_codecs(config: FederatedConfig) -> RunCodecs:
    """Make the codecs that the configuration names.

    Raises:
        ConfigError: one cannot be made, its options cannot be sent, or messages of two of them cannot be told apart.
    """
    chosen = (config.codec, config.section_codec, config.downlink_codec)
    (update, update_options), (section, section_options), (downlink, _) = map(_make_and_dump, chosen)
    longest = config.longest_codec
    return RunCodecs(
        update=update,
        section=section,
        downlink=downlink,
        longest=update if longest is config.codec else _make_and_dump(longest)[0],
        update_options=update_options,
        section_options=section_options,
        own=own_codecs(names_in(config)),
    )


def _make_and_dump(choice: Choice) -> tuple[Codec, str]:
    return CODECS.make(choice), CODECS.to_json(choice)


def max_model_bytes(num_values: int) -> int:
    """The longest message of a model that a client takes: a sparse one with raw indices, and a header."""
    return 8 * num_values + 4096


def check_downlink(codecs: RunCodecs, dim: int) -> None:
    """Raises ConfigError: models in a codec of one's own may be longer than a client takes. Built-in ones never are."""
    codec = codecs.downlink
    if type(codec) not in codecs.own:
        return
    if (longest := codec.max_bytes(dim)) > (most := max_model_bytes(dim)):
        raise ConfigError(
            f"federated.downlink_codec: a model of {dim} values may take {longest:,} bytes in {codec.name}, and "
            f"clients take at most {most:,}. Choose another codec, or other options of it"
        )


def own_codecs(names: Iterable[str], setting: str = CODECS.key) -> tuple[type[Codec], ...]:
    """The classes that these names stand for, without those that are built in. Imports them.

    Raises:
        ConfigError: there is no such class, it is no codec, or the messages of two of them cannot be told apart; the
            text begins with ``setting``, which names it.
    """
    found: dict[str, type[Codec]] = {}
    for name in names:
        if ":" in name and name not in found:
            try:
                found[name] = CODECS.find(name)
            except ConfigError as error:
                raise ConfigError(str(error).replace(CODECS.key, setting, 1)) from None
    try:
        check_magics(found.values()) if found else None
    except ValueError as error:
        raise ConfigError(f"{setting} {', '.join(found)}: {error}") from None
    return tuple(found.values())


def names_in(config: FederatedConfig) -> tuple[str, ...]:
    """Names of the codecs that a controller uses."""
    return config.codec.name, config.section_codec.name, config.downlink_codec.name


def names_of(welcome: Welcome) -> tuple[str, ...]:
    """Names of the codecs that a client of a run uses."""
    return welcome.codec, welcome.section_codec, welcome.downlink_codec


def read_codecs(welcome: Welcome, allowed: Collection[str], setting: str) -> tuple[Codec, Codec]:
    """Return the codec of the updates and that of what they hold beside the model, as a controller has chosen them.

    Args:
        allowed: codecs of one's own that this node's configuration names. setting: where.

    Raises:
        ConfigError: a codec, of models too, is neither built in nor allowed, or does not have the options that the
            controller has sent.
    """
    _check_name(welcome.downlink_codec, allowed, setting)
    return (
        _made(welcome.codec, welcome.codec_options, {}, allowed, setting),
        _made(welcome.section_codec, welcome.section_options, {}, allowed, setting),
    )


def codec_of(welcome: Welcome, terms: Mapping[str, Any] | None = None, *, allowed: Collection[str] = ()) -> Codec:
    """The codec of the updates, with the options that the controller has sent.

    Args:
        terms: of the round, as :func:`.client.client_optimizer.split_terms` finds them, which may have another density.
        allowed: codecs of one's own that this node takes.

    Raises:
        ConfigError: it is neither built in nor allowed, or its options are wrong.
    """
    density = (terms or {}).get(DENSITY)
    changed = {} if density is None else {DENSITY: density}
    return _made(welcome.codec, welcome.codec_options, changed, allowed)


def _made(
    name: str, options: str, changed: Mapping[str, Any], allowed: Collection[str], setting: str = CLIENT_SETTING
) -> Codec:
    _check_name(name, allowed, setting)
    try:
        sent = CODECS.parse_unchecked(name, options)
        known = CODECS.options_of(name).model_fields
        given = {**sent.options, **{key: value for key, value in changed.items() if key in known}}
        codec: Codec = CODECS.make(Choice.model_validate({**given, "name": name}))
        return codec
    except ValueError as error:
        advice = ". Use one version of its file on all nodes" if ":" in name else ""
        raise ConfigError(
            f"the controller chose the codec {name!r} with options that cannot be used here: {error}{advice}"
        ) from None


def _check_name(name: str, allowed: Collection[str], setting: str) -> None:
    """Raises ConfigError: there is no such codec, or this node does not import it."""
    if name in CODECS.table or name in allowed:
        return
    if ":" in name:
        raise ConfigError(
            f"the controller chose the codec {name[:200]!r}, which is not allowed here: {setting} is {list(allowed)}. "
            f"Nothing that a peer names is imported: add it to {setting}, where you have it"
        )
    raise ConfigError(
        f"the controller chose the codec {name[:200]!r}: there is no such codec here, only {', '.join(CODECS.table)}"
    )
