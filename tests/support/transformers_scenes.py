"""Scenes of Hugging Face's Trainer as a client: ``PYTHON transformers_scenes.py FOLDER [NAME...]``, for
test_transformers_callback.py."""

from __future__ import annotations

import gc
import os
import signal
import tempfile
import threading
import warnings
from typing import Any

import torch
import trainer_scene as scene
from peft import LoraConfig, get_peft_model
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.utils.data import Dataset
from trainer_scene import Loop, run
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import gradbus
from gradbus.runtime.errors import GradbusError, TrainingFailed
from gradbus.transformers import FederatedCallback

warnings.filterwarnings("ignore")


class Classifier(scene.Network):
    """``scene.Network`` as a Trainer calls it."""

    def forward(self, points: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.network(points)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(Dataset[dict[str, Tensor]]):
    """The data of a client, by names."""

    def __init__(self, client_id: int) -> None:
        self._data = scene.dataset(client_id)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        points, labels = self._data[index]
        return {"points": points, "labels": labels}


class InItsOrder(Trainer):  # type: ignore[misc]
    """Batches in the order of the plain loop."""

    def get_train_dataloader(self) -> Any:
        return Shuffled(scene.loader(self.client_id))


class Shuffled:
    """The plain loop's loader, with names."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.dataset = loader, loader.dataset

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return ({"points": points, "labels": labels} for points, labels in self.loader)


def arguments(**rules: Any) -> TrainingArguments:
    """Quiet, on the CPU, with the gradients as they are."""
    plain = {
        "use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.0,
        "lr_scheduler_type": "constant", "num_train_epochs": 20, "per_device_train_batch_size": scene.BATCH,
        "logging_strategy": "no", "remove_unused_columns": False, "output_dir": tempfile.mkdtemp(),
    }  # fmt: skip
    return TrainingArguments(**{**plain, **rules})


def train(
    job: str,
    client_id: int,
    *callbacks: TrainerCallback,
    model: nn.Module | None = None,
    rules: Any = None,
    federated: FederatedCallback | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A Trainer as a client. Returns the model, and what became of it."""
    model = Classifier() if model is None else model
    federated = FederatedCallback(job, **scene.settings(client_id), **options) if federated is None else federated
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer := scene.sgd(model), lambda step: 1.0)
    trainer = InItsOrder(
        model=model,
        args=arguments(**(rules or {})),
        train_dataset=Rows(client_id),
        eval_dataset=Rows(client_id + 50),
        callbacks=[*callbacks, federated],
        optimizers=(optimizer, constant),
    )
    trainer.client_id = client_id
    trainer.train()
    return {
        "model": model,
        "epochs": trainer.state.epoch,
        "steps": trainer.state.global_step,
        "hooks": len(model._forward_pre_hooks),  # noqa: SLF001 - whether it is gone
        "history": trainer.state.log_history,
    }


class Evaluated(TrainerCallback):  # type: ignore[misc]
    """Notes the weights that the Trainer evaluates and saves."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float]] = []

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("evaluated", _sum(kwargs["model"])))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("saved", _sum(kwargs["model"])))


def _sum(model: nn.Module) -> float:
    return sum(float(one.detach().double().sum()) for one in model.parameters())


def equals_the_loop() -> dict[str, Any]:
    """Accumulated gradients, evaluation and checkpoints in each epoch, which are of the global model."""
    seen = Evaluated()

    def script(job: str, client_id: int) -> dict[str, Any]:
        rules = {
            "gradient_accumulation_steps": 2, "eval_strategy": "epoch", "save_strategy": "epoch",
            "logging_strategy": "epoch",
        }  # fmt: skip
        return train(job, client_id, seen, rules=rules)

    expected = run(Loop(accumulate=2, make_model=Classifier), Loop(make_model=Classifier), make_model=Classifier)
    found = run(script, Loop(make_model=Classifier), make_model=Classifier)
    fitted = found.results[0]
    controller = Classifier()
    controller.load_state_dict(found.state)
    return {
        "expected": expected.checksums,
        "found": found.checksums,
        "losses": [[one.loss for one in each.reports] for each in (expected, found)],
        "samples": [one.num_samples for one in found.reports],
        "metrics": sorted(found.reports[1].train_metrics),
        "is_global": scene.is_equal(fitted["model"], found.state),
        "epochs": fitted["epochs"],
        "hooks": fitted["hooks"],
        "seen": [name for name, _ in seen.seen],
        "last_are_global": [value == _sum(controller) for _, value in seen.seen[-2:]],
    }


def rounds_of_steps() -> dict[str, Any]:
    """Rounds of four steps that do not end with epochs, and an optimizer that begins anew."""
    make: dict[str, Any] = {"make_model": Classifier}
    expected = run(Loop(steps=4, resets=True, **make), Loop(**make), **make)
    found = run(
        lambda *who: train(
            *who, every_n_steps=4, optimizer_state="reset", rules={"logging_strategy": "steps", "logging_steps": 3}
        )["steps"],
        Loop(**make),
        **make,
    )
    kept = run(lambda *who: train(*who, every_n_steps=4)["steps"], Loop(**make), **make)
    asked = run(lambda *who: train(*who)["steps"], rounds=2, training={"steps": 4}, **make)
    return {
        "expected": expected.checksums,
        "found": found.checksums,
        "kept": kept.checksums,
        "losses": [[one.loss for one in each.reports] for each in (expected, found)],
        "samples": [one.num_samples for one in found.reports],
        "steps": [found.results[0], asked.results[0]],
    }


def ends_before_the_run() -> dict[str, Any]:
    """Two epochs where the run has four rounds: the other client goes on alone."""
    make: dict[str, Any] = {"make_model": Classifier}
    with capture_logs() as logs:
        found = run(
            lambda *who: train(*who, rules={"num_train_epochs": 2})["epochs"],
            Loop(**make),
            rounds=4,
            clients_rules={"min": 1},
            **make,
        )
    told = [one for one in logs if one["event"] == "the trainer has ended before the run"]
    with capture_logs() as none:
        whole = run(lambda *who: train(*who, rules={"num_train_epochs": 2}), rounds=2, **make)
    return {
        "clients": [one.clients for one in found.reports],
        "epochs": found.results[0],
        "told": told,
        "told_of_a_whole_run": [one for one in none if one["event"] == "the trainer has ended before the run"],
        "is_global": scene.is_equal(whole.results[0]["model"], whole.state),
    }


class Diverging(Classifier):
    def forward(self, points: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        found = super().forward(points, labels)
        return {**found, "loss": found["loss"] * float("nan")}


def raises_where_the_run_fails() -> dict[str, Any]:
    """Its model is not finite, and the controller tries a round once."""

    def script(job: str, client_id: int) -> str:
        try:
            train(job, client_id, model=Diverging())
        except TrainingFailed as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    found = run(script, round={"max_attempts": 1}, make_model=Classifier)
    return {"raised": found.results[0]}


class Broken(Classifier):
    """Fails in its second epoch."""

    calls = 0

    def forward(self, points: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        self.calls += 1
        if self.calls > 8:
            raise ZeroDivisionError("a bug")
        return super().forward(points, labels)


def leaves_with_the_error() -> dict[str, Any]:
    """As a context it gives the reason; without, the client leaves when the callback is gone."""
    left = []
    for in_context in (True, False):

        def script(job: str, client_id: int, in_context: bool = in_context) -> str:
            federated: Any = FederatedCallback(job, **scene.settings(client_id))
            try:
                if in_context:
                    with federated:
                        train(job, client_id, model=Broken(), federated=federated)
                else:
                    train(job, client_id, model=Broken(), federated=federated)
            except ZeroDivisionError as error:
                text = str(error)
            del federated
            gc.collect()
            return text

        with capture_logs() as logs:
            found = run(script, Loop(make_model=Classifier), clients_rules={"min": 1}, make_model=Classifier)
        reasons = [one.get("reason") for one in logs if one["event"] == "client left" and one.get("client") == 0]
        left.append([found.results[0], [one.clients for one in found.reports], reasons])
    return {"left": left}


VOCABULARY, LENGTH = 32, 8


def adapted() -> nn.Module:
    """A small Llama with adapters of peft, the same on every node."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        adapters = LoraConfig(r=2, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model: nn.Module = get_peft_model(LlamaForCausalLM(config), adapters)
    return model


class Sequences(Dataset[dict[str, Tensor]]):
    """Each counts on in steps of ``client_id + 1``."""

    def __init__(self, client_id: int) -> None:
        starts = torch.randint(VOCABULARY, (64, 1), generator=torch.Generator().manual_seed(client_id))
        self._rows = (starts + (client_id + 1) * torch.arange(LENGTH)) % VOCABULARY

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


def adapters_of_peft() -> dict[str, Any]:
    """A language model in bfloat16 autocast, whose base is frozen; compiled, by a compiler that changes nothing."""

    def script(job: str, client_id: int) -> dict[str, Any]:
        federated = FederatedCallback(job, **scene.settings(client_id))
        model = adapted()
        compiled = {"torch_compile": True, "torch_compile_backend": "eager"}
        rules = {"bf16": True, "per_device_train_batch_size": 16, "learning_rate": 1e-2, **compiled}
        trainer = Trainer(
            model=model, args=arguments(**rules), train_dataset=Sequences(client_id), callbacks=[federated]
        )
        trainer.train()
        return {"epochs": trainer.state.epoch, "model": model}

    found = run(script, make_model=adapted, share={"include": ["*.lora_*"]}, rounds=4)
    return {
        "epochs": found.results[0]["epochs"],
        "losses": [one.loss for one in found.reports],
        "samples": [one.num_samples for one in found.reports],
        "bytes": [one.bytes_up for one in found.reports],
        "is_global": scene.is_equal(found.results[0]["model"], found.state),
    }


def is_refused() -> dict[str, Any]:
    """What cannot be."""
    texts = []
    for options in (
        {"every_n_epochs": 0},
        {"optimizer_state": "forget"},
        {"domian": 1},
        {"every_n_epoch": 1},
        {"client_id": None},
    ):
        try:
            FederatedCallback("job", **{"client_id": 0, **options})
        except (GradbusError, TypeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    try:
        state: Any = None
        FederatedCallback("job", client_id=0).on_train_begin(
            type("Args", (), {"deepspeed": None, "fsdp": None})(), state, None, model=Classifier(), optimizer=None
        )
    except GradbusError as error:
        texts.append(f"{type(error).__name__}: {error}")
    finally:
        del os.environ["ACCELERATE_USE_FSDP"]
    return {"texts": texts}


def a_run_that_is_over() -> dict[str, Any]:
    """The first receive finds the run at its end: the step that the Trainer makes all the same is undone.
    The model is as it was, or the last global one, if that comes in time."""
    begins = threading.Event()

    class Begins(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begins.set()

    def script(job: str, client_id: int) -> dict[str, Any]:
        model = Classifier()
        before = {name: one.clone() for name, one in model.state_dict().items()}
        done = train(job, client_id, Begins(), model=model)
        return {"steps": done["steps"], "before": before, "model": model}

    rules: dict[str, Any] = {
        "job": scene.new_job(),
        "make_model": Classifier,
        "rounds": 1,
        "checkpoint": {"dir": tempfile.mkdtemp()},
    }
    run(Loop(make_model=Classifier), **rules)
    found = run(script, starts_after=begins, **rules)
    (result,) = found.results
    is_undone = any(scene.is_equal(result["model"], state) for state in (result["before"], found.state))
    return {"steps": result["steps"], "is_undone": is_undone, "rounds": len(found.reports)}


def killed(job: str, pipe: Any) -> None:
    """Entry of a process that is killed within its second round."""

    class Stops(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 8:
                pipe.send("trains")
                signal.pause()

    train(job, 0, Stops())


def one_that_is_killed() -> dict[str, Any]:
    """Between receive and send: the other client goes on."""
    process, pipe = CHILDREN["killed"]
    job = scene.new_job()
    pipe.send(job)

    def kill(_: str, __: int) -> None:
        assert pipe.recv() == "trains"
        process.kill()

    make: dict[str, Any] = {"make_model": Classifier}
    with capture_logs() as logs:
        found = run(kill, lambda name, _: Loop(**make)(name, 1), job=job, clients_rules={"min": 1, "num": 2}, **make)
    lost = [one["client"] for one in logs if one["event"] == "client lost"]
    return {"clients": [one.clients for one in found.reports], "lost": lost}


def rank(job: str, pipe: Any, number: int, port: int) -> None:
    """Entry of one of two ranks that are one client."""
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(number)}
    os.environ.update({**names, "WORLD_SIZE": "2", "RANK": str(number), "GLOO_SOCKET_IFNAME": "lo"})
    try:
        model = Classifier()
        trainer = Trainer(
            model=model,
            args=arguments(ddp_backend="gloo"),
            train_dataset=Rows(0),
            callbacks=[FederatedCallback(job, **scene.settings(0))],
        )
        trainer.train()
        pipe.send({"sum": _sum(model), "epochs": trainer.state.epoch})
    except BaseException as error:
        pipe.send({"raised": f"{type(error).__name__}: {error}"})


def two_ranks() -> dict[str, Any]:
    """DistributedDataParallel: rank 0 talks for both."""
    job, pipes = scene.new_job(), [pipe for _, pipe in CHILDREN["ranks"]]
    for pipe in pipes:
        pipe.send(job)
    reports = run(job=job, clients=1, make_model=Classifier).reports
    return {"ranks": [pipe.recv() for pipe in pipes], "samples": [one.num_samples for one in reports]}


def program_of_the_page() -> dict[str, Any]:
    """That of docs/trainers.md."""
    return scene.run_the_page(PAGE, CHILDREN["page"])


if __name__ == "__main__":
    assert gradbus.client is not None  # loaded before the forks
    torch.set_num_threads(1)
    PAGE = scene.program_of_the_page("Hugging Face")
    FORKED = scene.Children()
    PORT = int(os.environ["SCENE_PORTS"].split(",")[0])
    CHILDREN: dict[str, Any] = {
        "page": [FORKED.fork(scene.follow_the_page, PAGE, site) for site in ("site-1", "site-2")],
        "killed": FORKED.fork(killed), "ranks": [FORKED.fork(rank, number, PORT) for number in range(2)],
    }  # fmt: skip
    try:
        scene.play(
            {
                one.__name__: one
                for one in (
                    equals_the_loop,
                    rounds_of_steps,
                    ends_before_the_run,
                    raises_where_the_run_fails,
                    leaves_with_the_error,
                    adapters_of_peft,
                    is_refused,
                    a_run_that_is_over,
                    one_that_is_killed,
                    two_ranks,
                    program_of_the_page,
                )
            }
        )
    finally:
        FORKED.end()
