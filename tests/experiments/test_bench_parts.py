"""Parts of the benchmarks that take seconds: real processes, every figure there, and a rank that fails is named."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from call_profile import Watched, profile

from gradbus import codecs
from gradbus.commands.lab.namespaces import NoNamespaces
from gradbus.experiments.bench import collectives, data_parallel, parameter_server, personal, sealing, selection
from gradbus.experiments.bench.collectives import (
    SIZES,
    CollectivesPlan,
    Setup,
    measure_cells,
    measure_device,
    measure_memory,
    measure_multicast,
    measure_steps,
    small_cnn,
    time_steps,
)
from gradbus.experiments.bench.processes import ProcessFailed, run_ranks
from gradbus.experiments.bench.sealing import CASES, LEVELS, TimedBlock
from gradbus.experiments.bench.timing import by_turns, in_turns, size_text, slowest_ms
from gradbus.experiments.bench.training import Training, train
from gradbus.models import mnist_mlp
from gradbus.models.lora import PATTERN
from gradbus.runtime.wire.frames import HEADER_BYTES

KIB_4 = 4096


@pytest.mark.parametrize("size", SIZES)
def test_a_size_is_read_as_it_is_shown(size: int) -> None:
    for text in (size_text(size), size_text(size).replace(" ", ""), str(size), f"{size} B"):
        assert collectives.size_of(text) == size


@pytest.mark.parametrize("text", ["", "4 GiB", "-4", "0", "6", "1.5MiB"])
def test_what_is_no_size_of_whole_floats_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="64KiB, got"):
        collectives.size_of(text)


def test_every_repeat_has_all_blocks_and_every_second_one_in_the_opposite_order() -> None:
    assert in_turns(["ours", "gloo"], 3) == ["ours", "gloo", "gloo", "ours", "ours", "gloo"]
    numbers = iter(range(4))
    assert by_turns({"a": lambda: next(numbers), "b": lambda: next(numbers)}, 2) == {"a": [0, 3], "b": [1, 2]}


def test_the_slowest_rank_counts_in_each_repeat() -> None:
    ranks = [{"ours": [1.0, 6.0, 1.0], "gloo": [2.0, 1.0, 1.0]}, {"ours": [3.0, 1.0, 1.0], "gloo": [1.0, 2.0, 4.0]}]
    assert slowest_ms(ranks) == {"ours": [3000.0, 6000.0, 1000.0], "gloo": [2000.0, 2000.0, 4000.0]}


@pytest.mark.slow
def test_a_rank_that_fails_is_named() -> None:
    with pytest.raises(ProcessFailed, match=r"rank 0 failed: (.|\n)*AttributeError: .*'model'"):
        run_ranks(time_steps, 1)
    run = Training(model=mnist_mlp, batch_size=8, config={"optimizer": {"lr": -1.0}}, data="glyphs")
    with pytest.raises(ProcessFailed, match=r"rank [01] failed(.|\n)*lr"):
        train(run, timeout_s=30)


@pytest.mark.slow
def test_collectives_are_timed_and_a_cell_above_its_limit_falls_short() -> None:
    setup = Setup("one-host", 2, {"all_reduce": {KIB_4: 1e-6}, "all_gather": {KIB_4: 1e6}})
    figures = measure_cells(CollectivesPlan(setups=[setup], sizes=[KIB_4], launches=1, repeats=2, encryption=True))
    assert [figure.name for figure in figures[::4]] == [f"{name} 4 KiB, one host, world 2" for name in setup.limits]
    assert [figure.asked for figure in figures[::4]] == ["<= 1e-06", "<= 1e+06"]
    assert figures[0].falls_short
    assert not figures[4].falls_short
    assert [figure.name.rpartition(", ")[2] for figure in figures[1:4]] == ["on a Group", "not encrypted", "encrypted"]
    assert {figure.asked for figure in figures[3::4]} == {"<= 1.05"}
    assert all(len(figure.samples) == 2 and min(figure.ratios) > 0 for figure in figures)


@pytest.mark.slow
def test_collectives_by_multicast_are_timed_beside_the_same_without_it() -> None:
    figures = list(measure_multicast([3], [KIB_4], 2))
    names = [f"{name} 4 KiB by multicast, DDS only, world 3" for name in ("broadcast", "all_gather", "all_reduce")]
    assert [figure.name for figure in figures] == names
    assert all(len(figure.ratios) == 2 for figure in figures)


@pytest.mark.slow
def test_data_parallel_steps_are_timed_with_shared_memory_switched_off() -> None:
    (figure,) = measure_steps(["dds-only"], 1, small_cnn)
    assert figure.asked == "<= 1.1"
    assert min(figure.ratios) > 0


@pytest.mark.slow
def test_memory_of_a_large_collective_includes_the_tensor() -> None:
    (figure,) = measure_memory(["one-host"], 64 << 20)
    assert figure.asked == "<= 3"
    assert figure.samples[0] >= 1


@pytest.mark.slow
def test_a_profile_shows_threads_of_both_backends_and_functions_of_ours() -> None:
    figures = list(profile(Watched("all_reduce", KIB_4, 0.1), 2, "one-host", (0, 1)))
    names = " ".join(figure.name for figure in figures)
    for rank in (0, 1):
        for backend in ("ours", "gloo"):
            assert f"all_reduce 4 KiB, one host, world 2, rank {rank}, {backend}, MainThread" in names
    assert "gradbus-" in names  # which thread has work depends on the way that frames take
    assert "pt_gloo_runloop" in names
    assert "Engine.start" in names  # which others take most changes from run to run


@pytest.mark.slow
def test_the_bytes_of_a_step_are_those_of_the_gradient_and_a_small_share_of_them() -> None:
    of_fp32, of_fp16 = data_parallel.measure_bytes(steps=4, data="glyphs", model=mnist_mlp)
    dense = int(of_fp32.note.split()[0].replace(",", ""))
    assert dense >= 4 * sum(parameter.numel() for parameter in mnist_mlp(0).parameters())
    assert 100 < of_fp32.samples[0] < of_fp16.samples[0]


def test_an_encrypted_block_is_compared_with_the_line_between_its_neighbours_without_a_key() -> None:
    relative = {"none": 1.0, "psk": 1.2, "identity": 3.0}
    blocks = [  # of a machine that gets slower by 1 ms from one block to the next
        TimedBlock(level, relative[level] * (1e-3 * at + 0.01), relative[level]) for at, level in enumerate(LEVELS * 4)
    ]
    case = CASES["round"]._replace(title="a round")
    figures = {figure.name: figure for figure in sealing.figures(case, blocks)}
    expected: dict[str, Any] = {"psk": 1.2, "identity": 3.0, "psk, processor": 1.2, "identity, processor": 3.0}
    for name, ratio in expected.items():
        assert figures.pop(f"a round: {name}").ratios == pytest.approx([ratio] * 3)
    assert not figures
    asked = [[figure.asked for figure in sealing.figures(it, blocks)] for it in (case, case._replace(asked=False))]
    assert asked == [["<= 1.05", "", "", ""], [""] * 4]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["round", "all-reduce-bus", "all-reduce-network"])
def test_rounds_and_collectives_are_timed_at_all_levels_by_turns(name: str) -> None:
    figures = sealing.measure(CASES[name]._replace(blocks=3), repeats=1)
    if not figures:
        pytest.skip("no namespaces can be made here")
    counted = 1 if name == "round" else 2  # of three blocks; controllers all had their first one at once
    assert [len(figure.ratios) for figure in figures] == [counted] * 4
    assert all(min(figure.ratios) > 0 for figure in figures)


@pytest.mark.parametrize("of_each", [1, 2])
def test_bytes_of_a_round_with_a_part_of_the_clients_are_one_model_and_one_update(of_each: int) -> None:
    try:
        found = selection.count_bytes(2, rounds=2, dim=25_000, selection={"count": 1}, of_each=of_each)
    except NoNamespaces as error:
        pytest.skip(str(error))
    assert 100_000 <= found.models < 101_000
    assert 100_000 <= found.updates < 101_000
    assert all(200_000 <= one < 400_000 for one in found.link)


def test_bytes_into_a_parameter_server_are_counted() -> None:
    (one,) = parameter_server.measure_bytes(((1, 1),), steps=2)
    assert one.falls_short is False
    assert 1.0 <= one.judged < 1.03


@pytest.mark.slow
def test_bytes_of_adapters_are_counted_and_personal_models_are_compared_with_the_global_one() -> None:
    task = {"samples": 16, "model": {"width": 32, "layers": 1, "heads": 2, "context": 16}}
    adapted = {**task, "lora": personal.LORA}
    found = personal.count_bytes(1, adapted, other={"seed": 5}, share={"include": [PATTERN]})
    values = 2 * 4 * 32 + 4 * (3 * 32 + 32)  # of A and B, of two layers
    update = len(codecs.get("fp32").encode(torch.zeros(values)))
    assert found.updates == personal.CLIENTS * (HEADER_BYTES + update), "one frame each"
    assert found.models[-1] > 4 * 96 * 32, "the base of the client that has another one"
    (ditto,) = personal.measure_ditto(1, task, clients=2)
    assert len(ditto.ratios) == 2


@pytest.mark.slow
def test_an_all_reduce_on_a_device_is_timed_beside_one_on_the_cpu() -> None:
    (figure,) = measure_device("one-host", [KIB_4], 1, device="cpu")
    assert figure.name == "all_reduce 4 KiB on cpu, one host, world 2"
    assert figure.against is not None
    assert figure.against.name == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_told_that_the_part_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(measure_device("one-host", [KIB_4], 1)) == []
    assert "gpu: skipped, as torch finds no accelerator" in capsys.readouterr().err
