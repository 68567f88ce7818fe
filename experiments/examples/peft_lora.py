"""Adapters of Hugging Face's peft, trained by two clients: nothing else of the transformer travels.

``python -m gradbus.experiments.examples.peft_lora`` makes a small Llama from a configuration, with random weights and
no download, and trains it on sequences that count on from a random beginning, with another step at each client. It
prints bytes and losses, and checks that the merged model says the same as the one with adapters.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import gradbus
from gradbus.models.task import EvalResult, TrainResult

VOCABULARY, LENGTH, SAMPLES = 64, 16, 64
CLIENTS = 2


def sequences(client_id: int, seed: int) -> Tensor:
    """int64, shape (SAMPLES, LENGTH): each counts on in steps of ``client_id + 1``."""
    starts = torch.randint(VOCABULARY, (SAMPLES, 1), generator=torch.Generator().manual_seed(seed))
    return (starts + (client_id + 1) * torch.arange(LENGTH)) % VOCABULARY


class CausalTask:
    """Next tokens, by a model whose adapters are all that is trained."""

    def build_model(self) -> nn.Module:
        """Return the same model on every node: all random choices are made under one seed."""
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=128,
            intermediate_size=512,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=LENGTH,
            use_cache=False,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            base = LlamaForCausalLM(config)
            adapters = LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
            model: nn.Module = get_peft_model(base, adapters)
        return model

    def prepare(self, client_id: int, num_clients: int) -> None:
        """The data are made as they are needed."""

    def train(
        self,
        model: nn.Module,
        *,
        client_id: int,
        round_id: int,
        epochs: int,
        lr: float,
        seed: int,
        should_stop: Callable[[], bool],
        **_: Any,
    ) -> TrainResult:
        """Steps of Adam on the adapters."""
        optimizer = torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=lr)
        model.train()
        losses = []
        for _epoch in range(epochs):
            for batch in torch.split(sequences(client_id, seed + round_id), 16):
                if should_stop():
                    raise RuntimeError("not wanted any more")
                optimizer.zero_grad()
                loss = model(input_ids=batch, labels=batch).loss
                torch.autograd.backward(loss)
                optimizer.step()
                losses.append(float(loss.detach()))
        return TrainResult(SAMPLES, sum(losses) / len(losses))

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> EvalResult:
        """On sequences of all clients."""
        model.eval()
        batches = [sequences(client_id, 1_000_003) for client_id in range(CLIENTS)]
        losses = [float(model(input_ids=batch, labels=batch).loss) for batch in batches]
        return EvalResult(None, sum(losses) / len(losses), CLIENTS * SAMPLES)


async def run(rounds: int, domain: int) -> dict[str, object]:
    """A controller and its clients in one process. Returns what is to be printed."""
    task, job = CausalTask(), f"peft-{os.getpid()}"
    config = gradbus.FederatedConfig(
        rounds=rounds,
        clients={"num": CLIENTS, "dead_after_s": 60.0},
        training={"lr": 0.01, "epochs": 2},
        share={"include": ["*.lora_*"]},
    )

    async def client(client_id: int) -> None:
        async with gradbus.connect(job, domain=domain) as bus:
            await gradbus.Client(bus, task, client_id=client_id).run()

    async with gradbus.connect(job, domain=domain) as bus, asyncio.TaskGroup() as group:
        controller = gradbus.Controller(bus, task, config)
        for client_id in range(CLIENTS):
            group.create_task(client(client_id))
        reports = await controller.run()
    model: Any = task.build_model()
    model.load_state_dict(await controller.state_dict())
    model.eval()
    batch = sequences(0, 7)
    with torch.no_grad():
        adapted = model(input_ids=batch).logits
        merged: Any = model.merge_and_unload()
        difference = float((merged(input_ids=batch).logits - adapted).abs().max())
    whole = sum(parameter.numel() for parameter in merged.parameters())
    return {
        "losses": [report.eval_loss for report in reports],
        "shared_values": controller.weights.numel(),
        "values": whole,
        "share": controller.weights.numel() / whole,
        "bytes_up_of_an_update": reports[-1].bytes_up // CLIENTS,
        "merged_differs_by": difference,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it, and print what it has found as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--domain", type=int, default=int(os.environ.get("GRADBUS_BUS__DOMAIN", "0")))
    chosen = parser.parse_args(arguments)
    print(json.dumps(asyncio.run(run(chosen.rounds, chosen.domain))), flush=True)


if __name__ == "__main__":
    main()
