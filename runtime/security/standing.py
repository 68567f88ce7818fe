"""What the security of a bus says to the actors on it: whether they may be there, and whose models count."""

from __future__ import annotations

from typing import Any

from gradbus.runtime.errors import ConfigError, JobTaken, JoinRefused
from gradbus.runtime.frames import FrameKey

NO_RANKS = (
    "bus.security=identity is for federated runs: ranks of a group have no controller that could let them in. Groups, "
    "workers and the store of dds:// are protected with bus.security=psk"
)


def job_taken(why: str) -> JobTaken:
    """The error of a controller that must not go on."""
    return JobTaken(f"{why}. Stop that one first, or choose another job (bus.job)")


class Standing:
    """Of a process whose security knows no single members: everybody may be anything, and models are not signed.

    Attributes:
        role: what this process may be; empty: anything.
        signs_models: whether it signs the models that it publishes.
    """

    role = ""
    signs_models = False

    @property
    def refusal(self) -> str:
        """Why this process must not go on; empty: it may."""
        return ""

    def check_controller(self) -> None:
        """Raise ConfigError: this process cannot be the controller of its job. Raise JobTaken: another one is."""
        if self.role not in ("", "controller"):
            raise ConfigError(
                f"this process joins as {self.role}, for its key is not bus.controller_key: the controller's key_file "
                f"is the one of which 'gradbus keys show' prints that key"
            )
        if self.refusal:
            raise job_taken(self.refusal)

    def check_client(self) -> None:
        """Raise ConfigError: this process cannot be a client. Raise JoinRefused: the controller does not let it in."""
        if self.role not in ("", "client"):
            raise ConfigError(f"this process joins as {self.role}: a client needs a key_file of its own")
        if self.refusal:
            raise JoinRefused(self.refusal)

    def check_rank(self) -> None:
        """Raise ConfigError: this process cannot be a rank of a group."""
        if self.role:
            raise ConfigError(NO_RANKS)

    def sign_model(self, key: FrameKey, flags: int, payload: Any) -> str:
        """What stands in the name of a model's frames. Takes its time with a large one."""
        return ""

    def check_model(self, key: FrameKey, flags: int, total_bytes: int) -> None:
        """Raise FrameError: ``signature``: the controller has not published a model of that size under this name."""
