"""Scenes of Lightning's Trainer as a client: ``PYTHON lightning_scenes.py FOLDER [NAME...]``, for
test_lightning_callback.py."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytorch_lightning
import torch
import trainer_scene as scene
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from structlog.testing import capture_logs
from torch import Tensor, nn
from trainer_scene import Loop, run

from gradbus.lightning import FederatedCallback
from gradbus.runtime.errors import GradbusError, TrainingFailed

warnings.filterwarnings("ignore")
QUIET: dict[str, Any] = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
    "num_sanity_val_steps": 2,
}  # fmt: skip


def module_of(library: Any = lightning) -> Any:
    """A LightningModule class with the tensors of ``scene.Network``."""

    class Module(library.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.network = scene.Network().network

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            loss = scene.loss_of(self, batch)
            self.log("train_loss", loss, on_epoch=True)
            return loss

        def validation_step(self, batch: list[Tensor], index: int) -> None:
            self.log("val_loss", scene.loss_of(self, batch))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return scene.sgd(self)

    return Module


def fit(
    job: str,
    client_id: int,
    *callbacks: Any,
    module: Any = None,
    trainer: dict[str, Any] | None = None,
    library: Any = lightning,
    **options: Any,
) -> dict[str, Any]:
    """A Trainer as a client. Returns the module, and what became of it."""
    module = module_of(library)() if module is None else module
    federated = FederatedCallback(job, **scene.settings(client_id), **options)
    rules = {"max_epochs": -1, "enable_checkpointing": any(isinstance(one, ModelCheckpoint) for one in callbacks)}
    made = library.Trainer(callbacks=[*callbacks, federated], **{**QUIET, **rules, **(trainer or {})})
    made.fit(module, scene.loader(client_id), scene.loader(client_id + 50))
    return {
        "module": module,
        "epochs": made.current_epoch,
        "steps": made.global_step,
        "stopped": made.should_stop,
        "metrics": sorted(made.callback_metrics),
    }


def equals_the_loop() -> dict[str, Any]:
    """Accumulated gradients, validation with its check, and checkpoints, whose weights are global ones."""
    folder = Path(tempfile.mkdtemp())

    def script(job: str, client_id: int) -> dict[str, Any]:
        saved = ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)
        return fit(job, client_id, saved, trainer={"accumulate_grad_batches": 2})

    expected = run(Loop(accumulate=2), Loop())
    found = run(script, Loop())
    (fitted, _) = found.results
    last = torch.load(folder / "epoch=2.ckpt", weights_only=True)
    plain = scene.Network()
    plain.load_state_dict(last["state_dict"])
    resumed = run(
        lambda job, client_id: fit_from(job, client_id, folder / "epoch=2.ckpt", {"accumulate_grad_batches": 2}),
        rounds=1,
    )
    return {
        "expected": expected.checksums,
        "found": found.checksums,
        "losses": [[one.loss for one in each.reports] for each in (expected, found)],
        "samples": [one.num_samples for one in found.reports],
        "metrics": sorted(found.reports[0].train_metrics),
        "is_global": scene.is_equal(fitted["module"], found.state),
        "epochs": fitted["epochs"],
        "checkpoint_is_global": scene.is_equal(plain, found.state),
        "resumed": resumed.results[0],
    }


def fit_from(job: str, client_id: int, checkpoint: Path, rules: dict[str, Any]) -> dict[str, Any]:
    """A Trainer that goes on from a checkpoint of its own."""
    federated = FederatedCallback(job, **scene.settings(client_id))
    made = lightning.Trainer(callbacks=[federated], max_epochs=-1, enable_checkpointing=False, **QUIET, **rules)
    made.fit(module_of()(), scene.loader(client_id), scene.loader(client_id + 50), ckpt_path=str(checkpoint))
    return {"epochs": made.current_epoch, "stopped": made.should_stop}


def rounds_of_steps() -> dict[str, Any]:
    """Rounds of four steps that do not end with epochs, and an optimizer that begins anew."""
    expected = run(Loop(steps=4, resets=True), Loop())
    found = run(lambda *who: fit(*who, every_n_steps=4, optimizer_state="reset")["steps"], Loop())
    kept = run(lambda *who: fit(*who, every_n_steps=4)["steps"], Loop())
    asked = run(lambda *who: fit(*who)["steps"], rounds=2, training={"steps": 4})
    return {
        "expected": expected.checksums,
        "found": found.checksums,
        "kept": kept.checksums,
        "samples": [one.num_samples for one in found.reports],
        "steps": [found.results[0], asked.results[0]],
        "asked": [one.outcome for one in asked.reports],
    }


def ends_before_the_run() -> dict[str, Any]:
    """Two epochs where the run has four rounds: the other client goes on alone."""
    with capture_logs() as logs:
        found = run(
            lambda *who: fit(*who, trainer={"max_epochs": 2})["epochs"], Loop(), rounds=4, clients_rules={"min": 1}
        )
    told = [one for one in logs if one["event"] == "the trainer has ended before the run"]
    with capture_logs() as none:
        whole = run(lambda *who: fit(*who, trainer={"max_epochs": 2}), rounds=2)
    return {
        "clients": [one.clients for one in found.reports],
        "epochs": found.results[0],
        "told": told,
        "told_of_a_whole_run": [one for one in none if one["event"] == "the trainer has ended before the run"],
        "is_global": scene.is_equal(whole.results[0]["module"], whole.state),
    }


def diverging() -> Any:
    """A module whose loss is not a number."""

    class Diverging(module_of()):  # type: ignore[misc]
        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            return super().training_step(batch, index) * float("nan")

    return Diverging()


def training_rules() -> dict[str, Any]:
    """What a rule adds to the gradients: Lightning computes these within the step of its optimizer."""
    found = {}
    for name, rules in (
        ("fedprox", {"training": {"rule": {"name": "fedprox", "mu": 1.0}}}),
        ("scaffold", {"training": {"rule": "scaffold"}, "strategy": "scaffold"}),
    ):
        found[name] = [run(one, Loop(), **rules).checksums for one in (Loop(), fit)]
    found["plain"] = [run(Loop(), Loop()).checksums]
    return found


def raises_where_the_run_fails() -> dict[str, Any]:
    """Its loss is not a number, and the controller tries a round once."""

    def script(job: str, client_id: int) -> str:
        try:
            fit(job, client_id, module=diverging())
        except TrainingFailed as error:
            return f"{type(error).__name__}: {error}"
        return "nothing was raised"

    return {"raised": run(script, round={"max_attempts": 1}).results[0]}


def leaves_with_the_error() -> dict[str, Any]:
    """An error of the module is the reason that the controller is given."""

    def script(job: str, client_id: int) -> str:
        module = module_of()()

        def broken() -> None:
            if module.current_epoch == 1:
                raise ZeroDivisionError("a bug")

        module.on_train_epoch_start = broken
        try:
            fit(job, client_id, module=module)
        except ZeroDivisionError as error:
            return str(error)
        return "nothing was raised"

    with capture_logs() as logs:
        found = run(script, Loop(), clients_rules={"min": 1})
    left = [one.get("reason") for one in logs if one["event"] == "client left" and one.get("client") == 0]
    return {"raised": found.results[0], "clients": [one.clients for one in found.reports], "left": left}


def frozen_and_mixed() -> dict[str, Any]:
    """A module whose first layer is frozen, in bfloat16 where autocast has it."""

    def make() -> nn.Module:
        model = scene.Network()
        model.network[0].requires_grad_(False)
        return model

    def script(job: str, client_id: int) -> bool:
        module = module_of()()
        module.network[0].requires_grad_(False)
        before = module.network[0].weight.clone()
        fit(job, client_id, module=module, trainer={"precision": "bf16-mixed"})
        return bool(torch.equal(before, module.network[0].weight)) and module.network[3].weight.dtype == torch.float32

    found = run(script, Loop(make_model=make), make_model=make)
    return {"kept": found.results[0], "clients": [one.clients for one in found.reports], "crc": found.checksums}


def with_the_older_name() -> dict[str, Any]:
    """The Trainer of pytorch_lightning."""
    expected = run(Loop(), Loop())
    found = run(lambda *who: fit(*who, library=pytorch_lightning)["epochs"], Loop())
    return {"expected": expected.checksums, "found": found.checksums}


def is_refused() -> dict[str, Any]:
    """What cannot be: a model that is spread over ranks, wrong arguments. And fast_dev_run does not join."""

    texts = []
    for options in (
        {"every_n_epochs": 1, "every_n_steps": 1},
        {"every_n_steps": 0},
        {"optimizer_state": "forget"},
        {"domian": 1},
        {"every_n_epoch": 1},
        {"client_id": None},
    ):
        try:
            FederatedCallback("job", **{"client_id": 0, **options})
        except (GradbusError, TypeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    trainer = lightning.Trainer(callbacks=[FederatedCallback("job", client_id=0)], fast_dev_run=True, **QUIET)
    with capture_logs() as logs:
        trainer.fit(module_of()(), scene.loader(0), scene.loader(1))
    callback = FederatedCallback("job", client_id=0)
    try:
        callback.setup(SimpleNamespace(strategy=type("FSDPStrategy", (), {})()), None, "fit")
    except GradbusError as error:
        texts.append(f"{type(error).__name__}: {error}")
    return {"texts": texts, "fast_dev_run": [one for one in logs if one["event"] == "not joined"]}


def a_run_that_is_over() -> dict[str, Any]:
    """The first receive finds the run at its end: nothing is trained."""
    begins = threading.Event()

    class Begins(lightning.Callback):  # type: ignore[misc]
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            begins.set()

    rules: dict[str, Any] = {"job": scene.new_job(), "rounds": 1, "checkpoint": {"dir": tempfile.mkdtemp()}}
    run(Loop(), **rules)
    found = run(lambda *who: fit(*who, Begins())["steps"], starts_after=begins, **rules)
    return {"steps": found.results[0], "rounds": len(found.reports)}


def killed(job: str, pipe: Any) -> None:
    """Entry of a process that is killed within its second round."""
    module = module_of()()

    def step(batch: int, *_: Any) -> None:
        if module.current_epoch == 1:
            pipe.send("trains")
            signal.pause()

    module.on_train_batch_start = step
    fit(job, 0, module=module)


def one_that_is_killed() -> dict[str, Any]:
    """Between receive and send: the other client goes on."""
    process, pipe = CHILDREN["killed"]
    job = scene.new_job()
    pipe.send(job)

    def kill(_: str, __: int) -> None:
        assert pipe.recv() == "trains"
        process.kill()

    with capture_logs() as logs:
        found = run(kill, lambda name, _: Loop()(name, 1), job=job, clients_rules={"min": 1, "num": 2})
    lost = [one["client"] for one in logs if one["event"] == "client lost"]
    return {"clients": [one.clients for one in found.reports], "lost": lost}


def rank(job: str, pipe: Any, number: int, port: int, module: Any) -> None:
    """Entry of one of two ranks that are one client."""
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_RANK": str(number), "NODE_RANK": "0"}
    os.environ.update({**names, "WORLD_SIZE": "2", "RANK": str(number), "GLOO_SOCKET_IFNAME": "lo"})
    strategy = DDPStrategy(process_group_backend="gloo")
    try:
        done = fit(job, 0, module=module(), trainer={"strategy": strategy, "devices": 2})
        weights = torch.cat([one.detach().flatten() for one in done["module"].parameters()])
        pipe.send({"sum": weights.double().sum().item(), "epochs": done["epochs"]})
    except BaseException as error:
        pipe.send({"raised": f"{type(error).__name__}: {error}"})


def two_ranks() -> dict[str, Any]:
    """DistributedDataParallel: rank 0 talks for both. The second run fails, which both ranks raise."""
    found: dict[str, Any] = {}
    for name in ("well", "failing"):
        job, pipes = scene.new_job(), [pipe for _, pipe in CHILDREN[name]]
        for pipe in pipes:
            pipe.send(job)
        reports = run(job=job, clients=1, round={"max_attempts": 1}).reports
        found[name] = [pipe.recv() for pipe in pipes]
        found[f"{name}_samples"] = [one.num_samples for one in reports]
    return found


def program_of_the_page() -> dict[str, Any]:
    """That of docs/trainers.md."""
    return scene.run_the_page(PAGE, CHILDREN["page"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    PAGE = scene.program_of_the_page("Lightning")
    FORKED = scene.Children()
    PORTS = [int(one) for one in os.environ["SCENE_PORTS"].split(",")]
    CHILDREN: dict[str, Any] = {
        "page": [FORKED.fork(scene.follow_the_page, PAGE, site) for site in ("site-1", "site-2")],
        "killed": FORKED.fork(killed),
        "well": [FORKED.fork(rank, number, PORTS[0], module_of()) for number in range(2)],
        "failing": [FORKED.fork(rank, number, PORTS[1], diverging) for number in range(2)],
    }
    try:
        scene.play(
            {
                one.__name__: one
                for one in (
                    equals_the_loop,
                    training_rules,
                    rounds_of_steps,
                    ends_before_the_run,
                    raises_where_the_run_fails,
                    leaves_with_the_error,
                    frozen_and_mixed,
                    with_the_older_name,
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
