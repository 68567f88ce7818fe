"""The language model of :mod:`.text` for clients, each with a part of the text: they train all of it, or adapters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradbus.experiments.examples.text import CharTransformer, TextTask, corpus
from gradbus.models import TrainingStopped, TrainResult
from gradbus.models.lora import add_lora
from gradbus.models.seeds import seeded_generator

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
EVALUATED = 256  # windows


class ClientTextTask(TextTask):
    """Prediction of the next character by clients. The first half of them have sentences, the second half sources of
    Python, so that their data differ."""

    def __init__(
        self,
        *,
        num_clients: int = 2,
        samples: int = 512,
        batch_size: int = 16,
        seed: int = 0,
        model: Mapping[str, int] | None = None,
        base: str | None = None,
        lora: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            num_clients: parts of the text, where the run does not know how many clients it has.
            samples: windows of ``context`` characters that a client trains on in an epoch, at random places.
            seed: of the initial weights.
            model: ``width``, ``layers``, ``heads``, ``context`` of the :class:`.text.CharTransformer`.
            base: safetensors file with the weights that the model begins with, as ``gradbus export`` writes it; None:
                random ones, the same on every node.
            lora: ``rank``, ``alpha``, ``targets`` of :func:`~gradbus.models.lora.add_lora`: the model is frozen and
                adapters are trained; None: all of the model is.
        """
        self._shape = {"context": 64, **(model or {})}
        super().__init__(batch_size=batch_size, seed=seed, context=self._shape["context"], windows=EVALUATED)
        self.num_clients, self.samples = num_clients, samples
        self._base, self._lora = base, lora

    def build_model(self) -> nn.Module:
        model = CharTransformer(self.seed, **self._shape)
        if self._base is not None:
            from safetensors.torch import load_file

            model.load_state_dict(load_file(self._base))
        if self._lora is not None:
            add_lora(model, **{"targets": ("*.qkv", "*.out"), "seed": self.seed, **self._lora})
        return model

    def prepare(self, client_id: int, num_clients: int) -> None:
        """Load the text, and cut it into so many parts."""
        self.num_clients = num_clients or self.num_clients
        self.part(client_id)

    def part(self, client_id: int) -> Tensor:
        """The text of a client: int64, shape (n,). Raises ValueError: there is no such client, or it is too short."""
        if not 0 <= client_id < self.num_clients:
            raise ValueError(f"client {client_id} of {self.num_clients}: expected 0 to {self.num_clients - 1}")
        train, _ = corpus()
        size = train.numel() // self.num_clients
        if size < self.context + 2:
            raise ValueError(f"{self.num_clients} clients have {size} characters each: need {self.context + 2}")
        return train[client_id * size : (client_id + 1) * size]

    def train(  # noqa: PLR0913 (the public signature of a task)
        self,
        model: nn.Module,
        *,
        client_id: int,
        round_id: int,
        epochs: int,
        lr: float,
        seed: int,
        subset_size: int,
        should_stop: Callable[[], bool],
        make_optimizer: MakeOptimizer | None = None,
        steps: int = 0,
    ) -> TrainResult:
        """As :meth:`.Task.train`, with Adam unless ``make_optimizer`` is given."""
        text, generator = self.part(client_id), seeded_generator("client text", seed, client_id, round_id)
        samples = min(subset_size or self.samples, self.samples)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = make_optimizer(trained) if make_optimizer else torch.optim.Adam(trained, lr=lr)
        each, taken, loss_sum = math.ceil(samples / self.batch_size), 0, 0.0
        starts = torch.randint(text.numel() - self.context - 1, (samples,), generator=generator)
        model.train()
        for step in range(steps or epochs * each):
            if should_stop():
                raise TrainingStopped(step, TrainResult(min(samples, taken), loss_sum / taken) if taken else None)
            if step % each == 0:
                starts = starts[torch.randperm(samples, generator=generator)]
            at = starts[(step % each) * self.batch_size :][: self.batch_size, None]
            optimizer.zero_grad()
            loss = self.loss(model, text[at + torch.arange(self.context + 1)])
            torch.autograd.backward(loss)
            optimizer.step()
            loss_sum += float(loss.detach()) * len(at)
            taken += len(at)
        return TrainResult(min(samples, taken), loss_sum / taken)
