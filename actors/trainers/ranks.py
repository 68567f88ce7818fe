"""The ranks that train one client together, with torch.distributed: rank 0 talks to the controller for all."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradbus.actors.federated.client.handover import TrainingRound
from gradbus.runtime.errors import RunAborted
from gradbus.runtime.json_text import parse_json

_MAX_TEXT_CHARS = 2000  # of an error


class Turn(NamedTuple):
    """What rank 0 has got from the controller: the next round; None: there is none. ``why``: empty, or why it does not
    know whether there is one."""

    round: TrainingRound | None
    why: str = ""


class Ranks:
    """One client's ranks. Each method is called by all of them, in the same order."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        """``world``: more than one only with a default process group that has all of them."""
        self.rank, self.world = rank, world

    @property
    def is_first(self) -> bool:
        """Whether this rank talks to the controller."""
        return self.rank == 0

    def lead(self, act: Callable[[], Turn], model: nn.Module) -> Turn:
        """Have rank 0 act, and give all ranks what it returns and the tensors of its model.

        Raises:
            RunAborted: on the other ranks, where rank 0 raises. And on rank 0 what that is.
        """
        if self.world == 1:
            return act()
        device = next(model.parameters()).device
        if not self.is_first:
            return self._follow(parse_json(self._broadcast_text("", device)), model)
        try:
            turn = act()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"[:_MAX_TEXT_CHARS]
            self._broadcast_text(json.dumps({"error": text}), device)
            raise
        found = None if turn.round is None else dataclasses.asdict(turn.round)
        self._broadcast_text(json.dumps({"round": found, "why": turn.why}), device)
        self._broadcast_model(model)
        return turn

    def add(self, numbers: Sequence[float], model: nn.Module) -> list[float]:
        """Return the sums over all ranks."""
        if self.world == 1:
            return list(numbers)
        device = next(model.parameters()).device
        dtype = torch.float32 if device.type == "mps" else torch.float64
        total = torch.tensor(numbers, dtype=dtype, device=device)
        dist.all_reduce(total)
        return [float(one) for one in total]

    def _follow(self, found: Any, model: nn.Module) -> Turn:
        if "error" in found:
            raise RunAborted(f"rank 0, which talks to the controller for this rank, has failed: {found['error']}")
        self._broadcast_model(model)
        terms = found["round"]
        return Turn(None if terms is None else TrainingRound(**terms), found["why"])

    def _broadcast_text(self, text: str, device: torch.device) -> str:
        payload = text.encode()
        size = torch.tensor([len(payload)], dtype=torch.int64, device=device)
        dist.broadcast(size, 0)
        data = torch.empty(int(size), dtype=torch.uint8, device=device)
        if self.is_first:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        dist.broadcast(data, 0)
        return bytes(data.cpu().numpy().tobytes()).decode()

    @torch.no_grad()
    def _broadcast_model(self, model: nn.Module) -> None:
        tensors = {id(one): one for one in model.state_dict(keep_vars=True).values() if isinstance(one, Tensor)}
        for tensor in tensors.values():
            if not tensor.numel():
                continue
            values = tensor.detach().contiguous()
            flat = values.reshape(-1)
            dist.broadcast(flat if flat.is_floating_point() else flat.view(torch.uint8), 0)
            if values.data_ptr() != tensor.data_ptr():
                tensor.copy_(values)
