"""A control loop that goes on beside federated training: its pace, what it shares, and the program as it is run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from patience import until

from gradbus.experiments.examples import control_loop
from gradbus.experiments.examples.control_loop import (
    PERIOD_S,
    SAMPLES,
    WEIGHTS,
    Friction,
    Joint,
    JointControl,
    Pace,
    Seat,
    SharedMemory,
    make_realtime,
    run_every,
    training_beside,
)


class Clock:
    """Time that passes by sleeping, and by what a tick takes."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def paced(monkeypatch: pytest.MonkeyPatch, takes_s: Sequence[float]) -> tuple[Pace, list[float]]:
    """A loop whose ticks take so long; when each of them began."""
    clock, begun, left = Clock(), list[float](), iter(takes_s)
    monkeypatch.setattr(control_loop, "time", clock)

    def tick() -> None:
        begun.append(clock.now_s - 100.0)
        clock.now_s += next(left, 0.0)

    return run_every(0.01, 0.1, tick), begun


def test_a_tick_that_takes_long_delays_only_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, begun = paced(monkeypatch, [0.0, 0.0, 0.008])
    assert begun == pytest.approx([0.01 * number for number in range(1, 11)])
    assert pace.missed == 0
    assert pace.late_s == pytest.approx([0.0] * 10, abs=1e-9)


def test_ticks_whose_time_has_passed_are_left_out_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pace, begun = paced(monkeypatch, [0.0, 0.035])
    assert begun == pytest.approx([0.01, 0.02, 0.06, 0.07, 0.08, 0.09, 0.10])
    assert pace.missed == 3


def test_a_model_is_taken_once_and_not_while_it_is_written() -> None:
    shared, weights = SharedMemory(), np.arange(WEIGHTS, dtype=np.float32)
    known = np.zeros(WEIGHTS, np.float32)
    assert shared.newest_model(known) is None
    shared.publish_model(weights)
    newest = shared.newest_model(known)
    assert newest is not None
    assert np.array_equal(newest, weights)
    assert shared.newest_model(weights) is None
    shared.model[7] = -1.0  # the next one has begun to be written
    assert shared.newest_model(weights) is None


def test_the_newest_samples_are_kept() -> None:
    shared = SharedMemory()
    assert shared.newest_samples().shape == (0, 2)
    for number in range(SAMPLES + 3):
        shared.note(number, -number)
    samples = shared.newest_samples()
    assert samples.shape == (SAMPLES, 2)
    assert {int(one) for one in samples[:, 0]} == set(range(3, SAMPLES + 3))


def test_the_torque_is_predicted_once_the_friction_was_learnt() -> None:
    shared = SharedMemory()
    control, task = JointControl(Joint(1), shared), Friction(shared)
    model = task.build_model()
    errors = []
    for round_id in range(1, 5):
        for _ in range(500):
            control.tick()
        errors.append(control.error)
        task.train(
            model, client_id=0, round_id=round_id, seed=1, epochs=5, lr=0.05, subset_size=0, should_stop=lambda: False
        )
    for _ in range(500):
        control.tick()
    assert control.models == 4
    assert control.error < 0.1 * errors[0]


@pytest.mark.skipif(not hasattr(os, "sched_setscheduler"), reason="this system has no such policies")
def test_a_control_thread_becomes_real_time_and_what_it_starts_does_not() -> None:
    def policies() -> tuple[int, str]:
        make_realtime(1)
        own = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
        program = [sys.executable, "-c", "import os; print(os.sched_getscheduler(0))"]
        return own, subprocess.run(program, capture_output=True, text=True, timeout=60, check=True).stdout

    with ThreadPoolExecutor(1) as thread:  # only this thread becomes so
        try:
            own, started = thread.submit(policies).result()
        except PermissionError:
            pytest.skip("real-time priorities are not allowed here")
    assert own == os.SCHED_FIFO
    assert int(started) == os.SCHED_OTHER


@pytest.mark.slow
@pytest.mark.nightly
def test_the_robot_learns_while_it_moves(domain: int) -> None:
    shared, job = SharedMemory(), f"arms-{os.getpid()}"
    control = JointControl(Joint(1), shared)

    def has_learnt() -> bool:
        run_every(PERIOD_S, 0.2, control.tick)
        return control.models >= 3 and control.error < 0.5

    program = [sys.executable, "-m", "gradbus.experiments.examples.control_loop", "--job", job]
    with subprocess.Popen([*program, "--domain", str(domain), "--controller", "--rounds", "1000000"]) as controller:
        try:
            with training_beside(Seat(job, "robot-1", domain), shared):
                until(has_learnt, 150.0)
        finally:
            controller.terminate()


@pytest.mark.slow
def test_a_robot_that_finds_no_controller_moves_all_the_same(domain: int) -> None:
    program = [sys.executable, "-m", "gradbus.experiments.examples.control_loop", "--job", f"alone-{os.getpid()}"]
    program += ["--domain", str(domain), "--name", "robot-7", "--seconds", "1"]
    robot = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    found = re.fullmatch(
        r"robot-7: (\d+) ticks, late by .* 0 models, error of the torque ([\d.]+)", robot.stdout.strip()
    )
    assert found, robot.stdout
    assert 0 < int(found[1]) <= 101


@pytest.mark.slow
def test_the_control_loop_goes_on_when_the_training_dies(domain: int) -> None:
    shared = SharedMemory()
    control = JointControl(Joint(1), shared)
    with training_beside(Seat(f"alone-{os.getpid()}", "robot-1", domain), shared) as child:
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
        child.join(30)
        began_s = time.monotonic()
        pace = run_every(PERIOD_S, 0.2, control.tick)
        assert time.monotonic() - began_s < 30
    assert len(pace.late_s) + pace.missed in (20, 21)  # by rounding
    assert child.exitcode == -signal.SIGKILL


@pytest.mark.slow
def test_the_training_ends_with_its_robot_also_after_kill_9(domain: int) -> None:
    words = ["--job", f"killed-{os.getpid()}", "--domain", str(domain), "--seconds", "600"]
    with subprocess.Popen([sys.executable, "-m", "gradbus.experiments.examples.control_loop", *words]) as robot:
        of_robot = psutil.Process(robot.pid)
        children: list[psutil.Process] = []
        until(lambda: any("spawn_main" in " ".join(child.cmdline()) for child in children_of(of_robot, children)))
        robot.kill()
    _, alive = psutil.wait_procs(children, timeout=120)
    assert alive == []


def children_of(process: psutil.Process, found: list[psutil.Process]) -> list[psutil.Process]:
    found[:] = process.children(recursive=True)
    return found
