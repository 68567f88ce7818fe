"""One rank with an exchange of gradients and no network: what it sends is kept, and its own gradient is the mean."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from settings import nested
from torch import Tensor, nn

from gradbus.actors.data_parallel.exchanges.base import Exchange
from gradbus.runtime.choices import EXCHANGES
from gradbus.runtime.config.data_parallel import DataParallelConfig


@dataclass
class Calls:
    """Stands in for a group: keeps what is handed to it."""

    world: int = 1
    sent: list[tuple[str, Any, dict[str, Any]]] = field(default_factory=list)

    def all_reduce(self, name: str, tensor: Tensor, **options: Any) -> str:
        self.sent.append((name, tensor, options))
        return name

    def all_gather(self, name: str, payload: bytes, **options: Any) -> str:
        self.sent.append((name, payload, options))
        return name


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))


class Scene:
    """One rank with an exchange, which steps alone: its own gradient is the mean."""

    def __init__(self, world: int = 1, **settings: Any) -> None:
        self.config = DataParallelConfig(**nested(settings))
        self.group, self.net = Calls(world), network()
        parameters = dict(self.net.named_parameters())
        self.exchange: Exchange = EXCHANGES.make(self.config.exchange, self.config, self.group, parameters)
        self.exchange.start_epoch(9)
        self.done = 0

    def send(self, *, active: int | None = None, factor: float = 1.0, has_data: bool = True) -> None:
        self.exchange.begin(self.done, self.group.world if active is None else active)
        if has_data:
            self.exchange.enable_overlap()
            x = torch.randn(8, 6, generator=torch.Generator().manual_seed(self.done))
            torch.autograd.backward(self.net(x).square().mean() * factor)
        self.exchange.send(has_data=has_data)
        self.done += 1

    def step(self, **options: Any) -> tuple[int, ...] | None:
        self.send(**options)
        payload = self.group.sent[-1][1]
        skipped_by = self.exchange.decode([[payload]] if isinstance(payload, bytes) else [])
        if skipped_by is None:
            self.exchange.apply()
        return skipped_by

    @property
    def parameters(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.net.parameters()).detach().clone()
