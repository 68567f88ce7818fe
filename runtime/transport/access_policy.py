"""What the security of a bus says to the actors on it: whether they may be there, and whose models count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from gradbus.runtime.errors import ConfigError, GradbusError, JobInUse, JoinRefused
from gradbus.runtime.wire.frames import FrameKey

NO_RANKS = (
    "this bus was opened for a federated run, and cannot hold ranks of a group: with security 'identity' that takes "
    "Security(..., role='worker'), as 'gradbus worker' and the torch.distributed backend give it"
)
NO_HOST = (
    "with security 'identity' no process can speak for several clients, as 'gradbus host' and 'gradbus virtual' do: "
    "the ids of a node on the allow list are of clients that have its key. Use psk, or start each client by itself"
)


def job_in_use(why: str) -> JobInUse:
    """The error of a controller that must not go on."""
    return JobInUse(f"{why}. Stop that one first, or choose another job (bus.job)")


class ClientNode(NamedTuple):
    """A node that has proved to be the sender of a client's message.

    Attributes:
        name: on the allow list. ids: of its clients, as ranges from .. to, both included.
        is_node: tells whether a name is that of any node on the allow list.
    """

    name: str
    ids: tuple[tuple[int, int], ...]
    is_node: Callable[[str], bool] = lambda name: False

    def has(self, client_id: int) -> bool:
        """Whether a client of this node may have this id."""
        return any(first <= client_id <= last for first, last in self.ids)

    @property
    def only_id(self) -> int | None:
        """Return the id of the only client that it may have; None: there may be several."""
        return self.ids[0][0] if len(self.ids) == 1 and self.ids[0][0] == self.ids[0][1] else None


class AccessPolicy:
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

    @property
    def absence(self) -> str:
        """Who has to let this process in, and has not done so; empty: nobody has to, or it is in."""
        return ""

    def when_refused(self, tell: Callable[[GradbusError], None]) -> Callable[[], None]:
        """Have ``tell`` called, on the receive thread or here, when a rank must not go on. Returns what undoes this."""
        return lambda: None

    def check_controller(self) -> None:
        """Raise ConfigError: this process cannot be the controller of its job. Raise JobInUse: another one is."""
        if self.role not in ("", "controller"):
            raise ConfigError(
                f"this process joins as {self.role}, for its key is not bus.controller_key: the controller's key_file "
                f"is the one of which 'gradbus keys show' prints that key"
            )
        if self.refusal:
            raise job_in_use(self.refusal)

    def check_client(self) -> None:
        """Raise ConfigError: this process cannot be a client. Raise JoinRefused: the controller does not let it in."""
        if self.role not in ("", "client"):
            raise ConfigError(f"this process joins as {self.role}: a client needs a key_file of its own")
        if self.refusal:
            raise JoinRefused(self.refusal)

    def check_host(self) -> None:
        """Raise ConfigError: this process cannot speak for several clients. Else as :meth:`check_client`."""
        if self.role:
            raise ConfigError(NO_HOST)
        self.check_client()

    def check_rank(self) -> None:
        """Raise ConfigError: this process cannot be a rank of a group."""
        if self.role:
            raise ConfigError(NO_RANKS)

    def check_ids(self, rank: int) -> None:
        """Raise ConfigError: the allow list gives this node other ranks. For the group of all ranks of a job."""

    def node_of(self, client_id: int, incarnation: int) -> ClientNode | None:
        """Return the node that sends as a client, which may be UNASSIGNED; None: this security knows no nodes."""
        return None

    def sign_model(self, key: FrameKey, flags: int, payload: Any) -> str:
        """Return what stands in the name of a model's frames. Takes its time with a large one."""
        return ""

    def check_model_signature(self, key: FrameKey, flags: int, total_bytes: int) -> None:
        """Raise FrameError: ``signature``: the controller has not published a model of that size under this name."""
