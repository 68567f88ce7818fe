"""``gradbus data inspect``: which client has what of the training set, as a table and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from gradbus.commands.configured_task import ConfiguredTask
from gradbus.commands.files import ClientFile, ControllerFile, load
from gradbus.commands.report import style
from gradbus.runtime.config.settings import read_settings
from gradbus.runtime.errors import ConfigError
from gradbus.runtime.plain_text import plain_line

SHOWN = 20  # clients in the table, the first ones
MAX_LABELS = 12  # columns of the table
MAX_BARS = 60  # clients with a bar each


@dataclass(frozen=True, slots=True, eq=False)
class Shares:
    """Holds what clients have.

    Attributes:
        counts: int64 (clients, labels): samples of each label.
        features: float64 (clients,): mean of all values of a client's samples.
        title: data set and partition.
    """

    counts: Tensor
    features: Tensor
    title: str

    @property
    def sizes(self) -> Tensor:
        """Samples of each client, (clients,)."""
        return self.counts.sum(1)

    @property
    def distance(self) -> Tensor:
        """Total variation distance of each client's labels from those of all, (clients,): 0 the same, 1 nothing in
        common."""
        own = self.counts / self.sizes.clamp(min=1).unsqueeze(1)
        of_all = self.counts.sum(0) / self.counts.sum().clamp(min=1)
        return (own - of_all).abs().sum(1) / 2


def shares_of(config: Path, overrides: Sequence[str], data_root: Path | None, clients: int | None) -> Shares:
    """Return what the task of a configuration gives to each client.

    Args:
        config: of a controller or of a client. clients: their number; None: that of the file.

    Raises:
        ConfigError: there is no such partition, or the task is the user's own and says nothing of it. NoData.
    """
    kind: Any = ClientFile if "client" in read_settings(config) else ControllerFile
    file = load(kind, config, overrides=overrides, data_root=data_root)
    expected = file.federated.clients.num if isinstance(file, ControllerFile) else None
    count = clients or max(expected or 0, file.task.num_clients)
    found = ConfiguredTask(file.task.model_copy(update={"num_clients": count})).shares()
    if found is None:
        raise ConfigError(f"task.task {file.task.task!r}: which client has what is known to that task alone")
    train, parts = found
    labels, num_labels = train.labels.cpu(), int(train.labels.max()) + 1
    values = train.images.cpu().reshape(len(train), -1).double().mean(1)
    partition = file.task.partition
    shown = partition if isinstance(partition, str) else ", ".join(f"{key} {value}" for key, value in partition.items())
    return Shares(
        counts=torch.stack([torch.bincount(labels[part], minlength=num_labels) for part in parts]),
        features=torch.stack([values[part].mean() for part in parts]),
        title=plain_line(f"{train.name}, {count:,} clients, {shown}")[:200],
    )


def print_shares(shares: Shares, console: Console) -> None:
    """A table of the first clients, and lines about all."""
    sizes, distance, (clients, labels) = shares.sizes, shares.distance, shares.counts.shape
    table = Table(title=shares.title, box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1))
    for name in ("client", "samples", *map(str, range(min(labels, MAX_LABELS))), "mean", "dist."):
        table.add_column(name, justify="right", min_width=len(name))
    for client in range(min(clients, SHOWN)):
        counts = shares.counts[client, :MAX_LABELS].tolist()
        table.add_row(
            str(client),
            f"{int(sizes[client]):,}",
            *(f"{one:,}" if one else "" for one in counts),
            f"{shares.features[client]:.2f}",
            f"{distance[client]:.2f}",
        )
    console.print(table)
    if clients > SHOWN:
        console.print(f"and {clients - SHOWN:,} more clients")
    held = (shares.counts > 0).sum(1).double()
    for what, values, form in (
        ("samples of a client", sizes.double(), ",.0f"),
        ("labels of a client", held, ".0f"),
        ("distance of its labels from those of all", distance, ".2f"),
    ):
        low, middle, high = (float(one) for one in (values.min(), values.median(), values.max()))
        console.print(f"{what}: {low:{form}} to {high:{form}}, median {middle:{form}}")


def draw_shares(shares: Shares, path: Path) -> None:
    """A bar of labels for each client; with many clients, how their sizes and distances are spread.

    Raises:
        ConfigError: matplotlib is missing.
    """
    style.need_matplotlib()
    with style.drawing():
        clients, labels = shares.counts.shape
        if clients <= MAX_BARS:
            figure, (axes,) = style.new_figure(1, 1)
            left = torch.zeros(clients)
            for label in range(labels):
                axes.barh(
                    range(clients),
                    shares.counts[:, label].tolist(),
                    left=left.tolist(),
                    color=_color(label),
                    hatch=None if label < len(style.SERIES) else "///",
                    label=str(label),
                )
                left += shares.counts[:, label]
            axes.invert_yaxis()
            style.label(axes, x="samples", y="client")
            style.whole_numbers(axes.yaxis)
            if labels <= 2 * len(style.SERIES):
                style.legend_above(axes, columns=labels)
        else:
            figure, (left_axes, right_axes) = style.new_figure(1, 2)
            left_axes.hist(shares.sizes.tolist(), bins=40, color=style.BLUE)
            style.label(left_axes, x="samples of a client", y="clients")
            right_axes.hist(shares.distance.tolist(), bins=40, range=(0, 1), color=style.ORANGE)
            right_axes.set_xlabel("distance of its labels")
        figure.suptitle(shares.title)
        style.save(figure, path)


def _color(label: int) -> str:
    return style.SERIES[label % len(style.SERIES)]
