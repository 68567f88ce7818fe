"""What the noise of a run has spent so far: a ledger of releases, which opacus turns into an epsilon.

Each round is one release of the Gaussian mechanism on all clients: the sampling rate is 1, whichever clients were
selected. A smaller rate would make epsilon smaller, but its proofs need a selection that nobody sees, of each client by
itself (Poisson), and a run tells in its messages and reports who takes part. See docs/privacy.md.

Renyi differential privacy adds up over rounds (Mironov, Renyi Differential Privacy, CSF 2017, Proposition 1), and holds
for the discrete Gaussian as for the continuous one (Canonne, Kamath, Steinke 2020, Theorem 4).
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import torch
from torch import Tensor

from gradbus.runtime.errors import CheckpointError, ConfigError
from gradbus.runtime.needs import how_to_install

SAMPLING_RATE = 1.0
# Orders of the Renyi divergence; epsilon is the smallest over them. Those beyond 64 are for small epsilons.
ORDERS = [1 + tenth / 10 for tenth in range(1, 100)] + [
    *range(11, 64),
    *range(64, 256, 8),
    *range(256, 1024, 32),
    *range(1024, 8193, 256),
]
_LONGEST = 1_000_000  # entries of a ledger in a checkpoint: one for each multiplier of the noise
_LEAST, _MOST = 1e-2, 1e6  # multipliers of the noise that are looked for


@functools.cache
def rdp_analysis() -> ModuleType:
    """The accountant of opacus. Raises ConfigError: it is not installed.

    The file is loaded by itself: the package would load all of its training engine for it, which takes seconds.
    """
    try:
        package = importlib.util.find_spec("opacus")
        if package is None or package.origin is None:
            raise ModuleNotFoundError("No module named 'opacus'", name="opacus")
        place = Path(package.origin).with_name("accountants") / "analysis" / "rdp.py"
        spec = importlib.util.spec_from_file_location("gradbus_opacus_rdp", place)
        assert spec is not None
        assert spec.loader is not None
        analysis = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(analysis)
        # It warns where epsilon would be a little smaller with other orders. Filters would be those of all threads.
        vars(analysis)["warnings"] = SimpleNamespace(warn=lambda *_, **__: None)
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"federated.privacy needs the accountant of opacus, which cannot be loaded ({error}). "
            f"{how_to_install('opacus')}"
        ) from None
    return analysis


def epsilon_of(releases: Iterable[tuple[float, int]], delta: float) -> float:
    """The epsilon of all these releases together.

    Args:
        releases: standard deviation of the noise as a multiple of the sensitivity, and how often. delta: 0 < delta < 1.

    Raises:
        ConfigError: opacus is not installed.
    """
    analysis = rdp_analysis()
    spent = [0.0] * len(ORDERS)
    for noise_multiplier, times in releases:
        more = analysis.compute_rdp(q=SAMPLING_RATE, noise_multiplier=noise_multiplier, steps=times, orders=ORDERS)
        spent = [one + float(other) for one, other in zip(spent, more, strict=True)]
    if not any(spent):
        return 0.0
    found, _ = analysis.get_privacy_spent(orders=ORDERS, rdp=spent, delta=delta)
    return max(0.0, float(found))


@functools.cache  # settings are checked more than once, and a search asks the accountant twenty times
def noise_for(epsilon: float, delta: float, rounds: int) -> float:
    """The least multiplier of the noise, to 4 digits and rounded up, with which so many rounds spend at most epsilon.

    Raises:
        ConfigError: there is none between 0.01 and 1,000,000, or opacus is not installed.
    """
    low, high = _LEAST, _MOST
    if epsilon_of([(high, rounds)], delta) > epsilon:
        raise ConfigError(
            f"federated.privacy.epsilon is {epsilon:g}, which {rounds:,} rounds exceed with any noise: allow more, or "
            f"make fewer rounds"
        )
    while high / low > 1.00005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if epsilon_of([(middle, rounds)], delta) <= epsilon else (middle, high)
    step = 10.0 ** (math.floor(math.log10(high)) - 3)
    return math.ceil(high / step) * step


@dataclass(slots=True)
class Ledger:
    """The releases of a run. ``delta``: with which epsilon is meant."""

    delta: float
    releases: list[tuple[float, int]] = field(default_factory=list)

    def spend(self, noise_multiplier: float) -> None:
        """Note one more release."""
        self.releases = self._with(noise_multiplier)

    def _with(self, noise_multiplier: float) -> list[tuple[float, int]]:
        if self.releases and self.releases[-1][0] == noise_multiplier:
            return [*self.releases[:-1], (noise_multiplier, self.releases[-1][1] + 1)]
        return [*self.releases, (noise_multiplier, 1)]

    @property
    def rounds(self) -> int:
        """Releases so far."""
        return sum(times for _, times in self.releases)

    def epsilon(self) -> float:
        """Return what has been spent so far. Raises ConfigError: opacus is not installed."""
        return epsilon_of(self.releases, self.delta)

    def epsilon_with(self, noise_multiplier: float) -> float:
        """Return what will have been spent after one more release. Raises ConfigError: opacus is not installed."""
        return epsilon_of(self._with(noise_multiplier), self.delta)

    def state(self) -> Tensor:
        """Float64, shape (entries, 2): multiplier and number of each."""
        return torch.tensor(self.releases, dtype=torch.float64).reshape(-1, 2)

    def load_state(self, state: Tensor) -> None:
        """The inverse of :meth:`state`. Raises CheckpointError: it is no ledger."""
        fits = state.ndim == 2 and state.shape[1] == 2 and len(state) <= _LONGEST and state.dtype == torch.float64
        entries = [(float(multiplier), float(times)) for multiplier, times in state.tolist()] if fits else []
        if not fits or not all(0 < one < math.inf and times >= 1 and times % 1 == 0 for one, times in entries):
            raise CheckpointError(
                "the checkpoint's ledger of privacy is damaged: expected multipliers of the noise and numbers of "
                "rounds. Use an earlier checkpoint, or start afresh in another state directory"
            )
        self.releases = [(one, int(times)) for one, times in entries]
