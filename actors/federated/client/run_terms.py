"""What a controller has chosen for a run, as its Welcome says it: read and checked once for each Welcome.

A codec or a rule of one's own is imported only where this node's configuration names it, too: :class:`Allowed`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradbus.actors.federated.chosen_codecs import CLIENT_SETTING, DENSITY, codec_of, read_codecs
from gradbus.actors.federated.model.sharing import Sharing, TensorSpec, check_buffers_sent, check_kept
from gradbus.actors.privacy.client import ClientPrivacy, privacy_of
from gradbus.codecs import Codec
from gradbus.runtime.config.federated import ClientConfig
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.wire.control import Welcome


class Allowed(NamedTuple):
    """Says what of a client a controller may have, or name.

    Attributes:
        rule, codecs: the training rule and the codecs of the user's own that it may name. Nothing else is imported.
        model: the model that training here has made may be shown to others.
    """

    rule: str = ""
    codecs: tuple[str, ...] = ()
    model: bool = False


NOTHING_OWN = Allowed()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RunTerms:
    """Holds the choices of one Welcome as objects.

    Attributes:
        sharing: what of the model is exchanged. privacy: what is asked of updates; None: nothing.
        codec: of updates; a round may have another density, see :meth:`codec_in`. section_codec: of what an update
            holds beside the model.
    """

    welcome: Welcome
    allowed: Allowed
    sharing: Sharing
    privacy: ClientPrivacy | None
    codec: Codec
    section_codec: Codec

    def codec_in(self, terms: Mapping[str, Any]) -> Codec:
        """Return the codec of a round. Raises ConfigError: its density cannot be.

        ``terms``: of the round, as :func:`.client_optimizer.split_terms` finds them.
        """
        return codec_of(self.welcome, terms, allowed=self.allowed.codecs) if DENSITY in terms else self.codec


def check_run(run: RunTerms, config: ClientConfig, specs: Sequence[TensorSpec]) -> None:
    """Look whether a run leaves at a client what its settings keep there.

    Args:
        specs: of the tensors of its model.

    Raises:
        ConfigError: updates are not masked where this client insists on that, or the run takes tensors that it keeps,
            or buffers that would say what noise or masks hide.
    """
    if config.least_members and not run.welcome.masked:
        raise ConfigError(
            f"the controller takes updates that are not masked, and client.least_members is {config.least_members}: "
            f"nothing is sent. Set federated.secure_aggregation.enabled on the controller"
        )
    check_kept(specs, run.sharing, config.keep_personal)
    insists = bool(config.least_members)
    check_buffers_sent(specs, run.welcome, is_private=run.privacy is not None, insists_on_masks=insists)


class RunChoices:
    """Reads Welcomes, each once: the one that was read last is kept. May be used on any thread."""

    def __init__(
        self, allowed: Allowed = NOTHING_OWN, *, setting: str = CLIENT_SETTING, least_noise: float = 0.0
    ) -> None:
        """
        Args:
            setting: names the setting of ``allowed.codecs``, for errors.
            least_noise: multiplier of the noise that this client insists on.
        """
        self._allowed = allowed
        self._setting = setting
        self._least_noise = least_noise
        self._newest: RunTerms | None = None

    def read(self, welcome: Welcome) -> RunTerms:
        """Return what a Welcome says. Raises ConfigError: it asks for what this client does not have or give."""
        newest = self._newest
        if newest is None or newest.welcome != welcome:
            newest = self._newest = self._checked(welcome)
        return newest

    def _checked(self, welcome: Welcome) -> RunTerms:
        codec, section_codec = read_codecs(welcome, self._allowed.codecs, self._setting)
        return RunTerms(
            welcome=welcome,
            allowed=self._allowed,
            sharing=Sharing.of_welcome(welcome),
            privacy=privacy_of(welcome.options, least_noise=self._least_noise),
            codec=codec,
            section_codec=section_codec,
        )
