"""Settings of ``gradbus simulate``."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from gradbus.commands.simulate.topology import LinkSpec
from gradbus.commands.simulate.ways import Way
from gradbus.runtime.choices import ALGORITHMS, Choice
from gradbus.runtime.config.settings import NonNegative, Positive, Settings, load_settings


class LinkSettings(Settings):
    """A link, both ways alike."""

    rate_mbit_s: Positive = 1000.0
    """Bits that it carries, in millions a second."""
    latency_us: NonNegative = 25.0
    """Microseconds from one end to the other."""
    overhead_us: NonNegative = 0.0
    """Microseconds for which a message occupies it beside the time of its bytes."""
    loss: Annotated[float, Field(ge=0, le=0.9)] = 0.0
    """Share of the frames of 64 KiB that are lost. They are sent again 10 ms later."""

    @property
    def spec(self) -> LinkSpec:
        """Return the same in seconds and bytes."""
        return LinkSpec(
            rate_bytes_s=self.rate_mbit_s * 125_000,
            latency_s=self.latency_us * 1e-6,
            overhead_s=self.overhead_us * 1e-6,
            loss=self.loss,
        )


class TopologySettings(Settings):
    """Hosts, racks and links."""

    ranks_per_host: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of ranks on a host, which share its link. Ranks of one host follow one another."""
    hosts_per_rack: Annotated[int, Field(ge=1, le=65536)] | None = None
    """Number of hosts at one switch. null: all are at one."""
    network: LinkSettings = LinkSettings()
    """From a host to its switch."""
    local: LinkSettings = LinkSettings(rate_mbit_s=80_000.0, latency_us=1.0)
    """From a rank into its host, where a host has several."""
    uplink: LinkSettings | None = None
    """From a switch to the core switch. null: as `network`."""


class StragglerSettings(Settings):
    """Ranks that compute more slowly."""

    ranks: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Ranks whose computing takes `factor` times as long."""
    factor: Positive = 2.0
    """That factor."""
    jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Standard deviation of the logarithm of a factor that is drawn for each rank and step."""


class ComparisonSettings(Settings):
    """Ways to sum gradients, compared: each way with each number of ranks, loss, memory, number of jobs and seed."""

    ways: tuple[Way, ...] = ()
    """Which: see `commands/simulate/ways.py`. []: none; `algorithm` is simulated instead."""
    losses: tuple[Annotated[float, Field(ge=0, le=0.5)], ...] = (0.0,)
    """Shares of the packets that each link loses."""
    memory: tuple[Annotated[float, Field(ge=0, le=1000)] | None, ...] = (None,)
    """Slots of a switch, in multiples of those that keep the links of one job busy. null: enough for all."""
    jobs: tuple[Annotated[int, Field(ge=1, le=64)], ...] = (1,)
    """Numbers of jobs that share the switches, each on hosts of its own. They begin at times that the seed draws."""
    seeds: tuple[Annotated[int, Field(ge=0, le=0x7FFF_FFFF)], ...] = (0,)
    """Seeds of what is lost and of when jobs begin."""
    blocks: Annotated[int, Field(ge=1, le=1 << 20)] = 128
    """Packets that a whole gradient is cut in, where switches or servers add it."""
    trees: Annotated[int, Field(ge=1, le=64)] = 4
    """Trees of `mtina`."""
    window_blocks: Annotated[int, Field(ge=1)] | None = None
    """Packets of a rank that are under way. null: all; where `memory` is given, as many as keep its link busy."""
    retransmit_ms: Positive | None = None
    """Milliseconds after which a packet is sent again, for the first time. null: three times what a window takes."""
    most_messages: Annotated[int, Field(ge=0)] = 1_000_000
    """Simulations that would take more messages are left out, and the closed form stands alone."""


class SimulationSettings(Settings):
    """A simulation of data-parallel steps."""

    algorithm: Annotated[Choice, ALGORITHMS] = ALGORITHMS.default
    """What the ranks exchange, and how, as `parallel.algorithm` of a worker."""
    worlds: tuple[Annotated[int, Field(ge=1, le=4096)], ...] = (2, 4, 8, 16, 32)
    """Numbers of ranks, one simulation each."""
    trace: str | None = None
    """Sizes and times of a model's gradients: `vgg19` or `resnet50`, or a file of `python -m
    gradbus.commands.simulate.trace`. It has a `batch_size` of its own, and stands before `model`."""
    compute_scale: Positive = 1.0
    """Factor of the times of a trace, which are those of one core: 0.01 stands for an accelerator 100 times as fast."""
    gradient_bytes: Annotated[int, Field(ge=4)] | None = None
    """Size of one gradient that belongs to no model, in place of `model`; with `forward_s` and `backward_s`."""
    model: str = "gradbus.models:mnist_cnn"
    """Function that makes the network whose gradients are exchanged, as package.module:attribute."""
    model_options: dict[str, Any] = Field(default={})
    """Arguments of that function."""
    input_shape: tuple[Annotated[int, Field(ge=1)], ...] = (1, 28, 28)
    """Shape of one sample; its passes are timed on this machine where `forward_s` and `backward_s` are not given."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Number of samples of a rank and step."""
    forward_s: NonNegative | None = None
    """Seconds of a forward pass. null: measured."""
    backward_s: NonNegative | None = None
    """Seconds of a backward pass, shared by all parameters alike. null: measured, parameter by parameter."""
    update_s: NonNegative = 0.0
    """Seconds of the optimizer."""
    overlap: bool = True
    """Whether a bucket of gradients is sent during the backward pass."""
    bucket_bytes: Annotated[int, Field(ge=1)] = 25 << 20
    """Size, in bytes, at which a bucket is closed."""
    first_bucket_bytes: Annotated[int, Field(ge=1)] = 1 << 20
    """The same size for the first bucket."""
    steps: Annotated[int, Field(ge=1, le=1000)] = 3
    """Number of steps."""
    values: bool = False
    """Whether random gradients are exchanged, which algorithms that look at values need; else their sizes alone."""
    seed: Annotated[int, Field(ge=0, le=0x7FFF_FFFF)] = 0
    """Seed of all that is drawn."""
    topology: TopologySettings = TopologySettings()
    stragglers: StragglerSettings = StragglerSettings()
    compare: ComparisonSettings = ComparisonSettings()


class SimulationFile(Settings):
    """A configuration file of ``gradbus simulate``."""

    simulate: SimulationSettings = SimulationSettings()


def read_simulation(path: Path, overrides: Iterable[str] = ()) -> SimulationSettings:
    """Read a file, the environment (``GRADBUS_SIMULATE__SEED=1``) and the overrides. Raises ConfigError."""
    own = {name: text for name, text in os.environ.items() if name.upper().startswith("GRADBUS_SIMULATE__")}
    return load_settings(SimulationFile, path, overrides=overrides, environment=own).simulate
