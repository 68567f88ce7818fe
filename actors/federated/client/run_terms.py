"""What a controller has chosen for a run, as its Welcome says it: read and checked once for each Welcome.

A codec or a rule of one's own is imported only where this node's configuration names it, too: :class:`Allowed`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradbus.actors.federated.chosen_codecs import CLIENT_SETTING, DENSITY, codec_of, read_codecs
from gradbus.actors.federated.model.sharing import Sharing
from gradbus.actors.privacy.client import ClientPrivacy, privacy_of
from gradbus.codecs import Codec
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
