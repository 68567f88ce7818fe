"""The figures: from what a real run left to a picture with every series, and clear words where the data are wrong."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from gradbus.commands.report import style
from gradbus.experiments.bench.rungs import RungTimes
from gradbus.experiments.bench.thin_link import LossWindow
from gradbus.experiments.figures import __main__ as program
from gradbus.experiments.figures import aggregation, index
from gradbus.experiments.figures.canvas import PublishedFile, published, stars
from gradbus.experiments.figures.index import CATALOGUE, FigureEntry, entries_of, install
from gradbus.experiments.figures.plan import (
    CODECS,
    EXCHANGES,
    FULL,
    QUICK,
    RUNGS,
    TRACES,
    WAYS,
    WITHOUT_DATA,
    FederatedRun,
    LadderRun,
    ParallelRun,
    SimulationRun,
    ThinLinkRun,
    make_plan,
    runs_of,
)
from gradbus.experiments.figures.runs import execute
from gradbus.experiments.figures.store import Store, StoredRun
from gradbus.experiments.figures.tables import TABLES, BadData, TableRow, collect, read_table, write_table
from gradbus.runtime.errors import ConfigError

pytestmark = pytest.mark.slow  # real processes: a controller with two clients, and two ranks

FEDERATED = FederatedRun(codec="sq8", downlink="sq8", rounds=2, samples=32, data="glyphs")
PARALLEL = ParallelRun(exchange="dgc", epochs=2, warmup=1, samples=256, batch_size=32, data="glyphs")
THIN_LINK = [ThinLinkRun(way=way, windows=3, data="glyphs") for way in WAYS]
LADDER = [LadderRun(rung=rung, samples=256, epochs=1, data="glyphs") for rung in RUNGS]
SIMULATION = SimulationRun(
    name="small",
    settings=json.dumps(
        {
            "gradient_bytes": 1 << 16,
            "forward_s": 1e-4,
            "backward_s": 1e-4,
            "overlap": False,
            "steps": 1,
            "worlds": [8, 16],
            "topology": {"hosts_per_rack": 8},
            "compare": {
                "ways": sorted(aggregation.WAYS),
                "memory": [8],
                "jobs": [2],
                "losses": [0],
                "blocks": 4,
            },
        }
    ),
)
Tables = dict[str, list[Any]]
FILES = (
    "rounds.jsonl",
    "epochs-rank-0.jsonl",
    "comparison.csv",
    "ladder.json",
    "thin_link.json",
)  # what runs leave, in their order below


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[str, StoredRun]]:
    """A run of each kind: real processes, over DDS."""
    store = Store(tmp_path_factory.mktemp("runs"))
    return [
        ("timing", store.ensure(FEDERATED, lambda folder: execute(FEDERATED, folder))[0]),
        ("parallel", store.ensure(PARALLEL, lambda folder: execute(PARALLEL, folder))[0]),
        ("loss", store.ensure(SIMULATION, lambda folder: execute(SIMULATION, folder))[0]),
        *(("ladder", store.ensure(run, partial(write_rung, run))[0]) for run in LADDER),
        *(("thin_link", store.ensure(run, partial(write_windows, run))[0]) for run in THIN_LINK),
    ]


def write_rung(run: LadderRun, folder: Path) -> None:
    """What a rung leaves; real ones need network namespaces, and are run in test_ladder.py."""
    found = RungTimes(
        rung=run.rung,
        step_s=0.4,
        compute_s=0.1,
        bytes_out=7e6,
        samples_s=640.0,
        steps=200,
        accuracy=0.975,
        to_target_s=None if run.rung == "star" else 80.0,
        simulated_step_s=0.38,
    )
    (folder / "ladder.json").write_text(json.dumps(found.to_json()), encoding="utf-8")


def write_windows(run: ThinLinkRun, folder: Path) -> None:
    """What a training on a thin link leaves; a real one is in test_ladder.py. In one window DDP has made no step."""
    windows = [
        LossWindow(until_s=2.0 * at, steps=3.0 * at, loss=None if (run.way, at) == ("DDP", 2) else 1 / at).to_json()
        for at in range(1, 4)
    ]
    (folder / "thin_link.json").write_text(json.dumps({"windows": windows}), encoding="utf-8")


@pytest.fixture(scope="module")
def tables(finished: list[tuple[str, StoredRun]]) -> Tables:
    """All series of all figures, with the numbers of the two runs in each."""
    found = collect(finished)
    groups = ("codecs", "skewed", "old_bytes", "timing")
    federated = [
        {"group": group, "codec": codec, "seed": seed} for group in groups for codec in CODECS for seed in (0, 1)
    ]
    kinds = [(exchange, False) for exchange in EXCHANGES] + [("dense", True)]
    parallel = [
        {"exchange": exchange, "overlap": overlap, "seed": seed} for exchange, overlap in kinds for seed in (0, 1)
    ]
    simulated = [{"group": group, "model": trace} for group in sorted(WITHOUT_DATA) for trace in TRACES]
    return {
        name: [row.model_copy(update=update) for update in updates for row in found[name]]
        for name, updates in (
            ("simulations", simulated),
            ("deployments", [{}]),
            ("rounds", federated),
            ("updates", federated),
            ("epochs", parallel),
            ("ranks", parallel),
            ("ladder", [{}]),
            ("thin_link", [{}]),
        )
    }


def test_the_tables_say_what_the_runs_left(finished: list[tuple[str, StoredRun]]) -> None:
    found: Tables = collect(finished)
    reports = [json.loads(line) for line in (finished[0][1].path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert [row.round_id for row in found["rounds"]] == [1, 2]
    for row, report in zip(found["rounds"], reports, strict=True):
        assert (row.bytes_up, row.bytes_down, row.accuracy) == (
            report["bytes_up"],
            report["bytes_down"],
            report["accuracy"],
        )
        # Noted one after the other, so by a little, or by a standstill, the decoding may be longer than what holds it.
        assert row.decode_s == pytest.approx(sum(one["counted_s"] - one["adding_s"] for one in report["timeline"]))
        assert row.aggregate_s == pytest.approx(max(0.0, report["aggregate_s"] - row.decode_s))
        # But for decoding: the first update is decoded while other clients train. And the slowest to train and the
        # slowest to encode may be two clients, so that nothing is left for the wire.
        parts = (row.train_s, row.encode_s, row.wire_s, row.aggregate_s, row.checkpoint_s, row.publish_s)
        assert row.wire_s == 0 or sum(parts) <= row.seconds * 1.05
    assert [(row.round_id, row.client_id) for row in found["updates"]] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert sum(row.num_bytes for row in found["updates"]) == sum(report["bytes_up"] for report in reports)
    assert [(row.rank, row.epoch, row.steps) for row in found["epochs"]] == [(0, 1, 4), (0, 2, 4), (1, 1, 4), (1, 2, 4)]
    assert found["epochs"][0].bytes_per_step > found["epochs"][1].bytes_per_step > 0, "the warm-up sends more"
    assert [(row.rank, row.steps) for row in found["ranks"]] == [(0, 8), (1, 8)]
    assert all(0 <= row.wait_s_mean <= row.wait_s_max for row in found["ranks"])


def test_a_demo_that_has_just_been_started_writes_a_line_for_each_round_and_no_warning(
    finished: list[tuple[str, StoredRun]],
) -> None:
    lines = (finished[0][1].path / "output.log").read_text(encoding="utf-8").splitlines()
    of_rounds = [line.partition(":")[0] for line in lines if "still waiting" not in line]
    assert of_rounds[2:] == ["round 1/2", "round 2/2", "done"], lines


def test_a_table_comes_back_as_it_was_written(tables: Tables, tmp_path: Path) -> None:
    for name, kind in TABLES.items():
        path = tmp_path / "data" / f"{name}.csv"
        write_table(path, kind, tables[name])
        assert read_table(path, kind) == tables[name] != []


def texts(figure: Figure) -> list[str]:
    """Everything that can be read in it."""
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_visible()]


SERIES: dict[str, Sequence[str]] = {
    "parallel_bytes": ("dense fp32", "int8\n(baseline of the original)", "DGC 0.1 %"),
    "parallel_accuracy": ("dense fp32", "int8 (baseline of the original)", "DGC 0.1 %"),
    "parallel_wait": ("dense,\noverlap", "dense", "int8\n(original)", "DGC\n0.1 %", "mean", "maximum"),
    "ladder": ("star", "ring", "ByteGrad", "ByteGrad,\noverlap", "75%", "80 s", "not\nreached", "simulated"),
    "thin_link_loss": ("DDP, dense fp32", "DGC 0.1 %", "DiLoCo q8, H = 50"),
    "aggregation_resnet50": ("Ring", "PS-1", "PS-N", "HINA", "MTINA", "CINA"),
    "aggregation_vgg19": ("Ring", "PS-1", "PS-N", "HINA", "MTINA", "CINA"),
    "aggregation_memory": ("Ring", "SwitchML", "RA-INA", "ATP", "ESA"),
    "aggregation_jobs": ("Ring", "SwitchML", "RA-INA", "ATP", "ESA"),
    "aggregation_loss": ("one switch", "RA-INA", "ring of packets", "PS-1"),
    "aggregation_break_even": ("N = 8", "N = 1,024", "1 aggregator", "16 aggregators"),
    "aggregation_cost": ("HINA", "MTINA", "CINA"),
    "federated_bytes": (*CODECS, "version 1, models in plain float32", "version 2, the codec both ways"),
    "federated_dds": CODECS,
    "federated_time": (*CODECS, "train", "encode", "wire", "decode and add", "aggregate", "checkpoint, publish"),
    "federated_accuracy": CODECS,
    "tradeoff": (*CODECS, "equal shares (IID)", "unequal shares (Dirichlet 0.5)"),
}


@pytest.mark.parametrize(("name", "entry"), CATALOGUE.items(), ids=list(CATALOGUE))
def test_a_figure_shows_every_series_with_units_and_says_how_it_was_made(
    name: str, entry: FigureEntry, tables: Tables
) -> None:
    with style.drawing():
        figure = entry.draw(tables[entry.table], QUICK)
        seen = texts(figure)
        full = "\n".join(texts(entry.draw(tables[entry.table], FULL)))
    assert set(SERIES[name]) <= set(seen)
    for axes in figure.axes:
        assert axes.get_xlabel()
        if not axes.get_ylabel():  # that of the panel to the left holds for it
            assert axes.get_shared_y_axes().joined(axes, figure.axes[0])
    assert any(label.endswith((" / %", " / B", " / kB", " / MB", " / s", " / ms", " / µs")) for label in seen)
    assert "QUICK: 2 rounds of 500 samples, 3 epochs, 1 seed" in " ".join("\n".join(seen).split())
    assert "QUICK" not in full


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=list(CATALOGUE))
def test_a_figure_names_the_data_that_it_was_made_with(entry: FigureEntry, tables: Tables) -> None:
    with style.drawing():
        said = {
            data: " ".join("\n".join(texts(entry.draw(tables[entry.table], replace(FULL, data=data)))).split())
            for data in ("mnist", "glyphs")
        }
    assert "MNIST" not in said["glyphs"].partition("published")[0]
    assert ("MNIST" in said["mnist"]) == ("Glyphs (digits drawn on the spot)" in said["glyphs"])


def test_values_published_for_mnist_are_not_drawn_beside_those_of_other_data(tables: Tables) -> None:
    for name in ("federated_accuracy", "parallel_accuracy"):
        entry = CATALOGUE[name]
        with style.drawing():
            said = " ".join("\n".join(texts(entry.draw(tables[entry.table], replace(FULL, data="glyphs")))).split())
        assert published(name)
        assert "published" not in said


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=list(CATALOGUE))
def test_a_figure_lacking_a_series_is_not_drawn(entry: FigureEntry, tables: Tables) -> None:
    some = [
        row
        for row in tables[entry.table]
        if {getattr(row, name, None) for name in ("codec", "exchange", "rung", "way")}.isdisjoint(
            {"s4", "dgc", "DGC", "ring", "ina", "hina"}
        )
    ]
    with style.drawing(), pytest.raises(BadData, match=r"no rows of .*(s4|dgc|DGC|ring|ina)"):
        entry.draw(some, QUICK)


@pytest.mark.parametrize(("load", "said"), [(1.2, False), (7.5, True)])
def test_times_of_a_busy_machine_are_called_too_long(load: float, said: bool, tables: Tables) -> None:
    for name in ("parallel_wait", "federated_dds", "federated_time"):
        entry = CATALOGUE[name]
        with style.drawing():
            figure = entry.draw([row.model_copy(update={"load_per_core": load}) for row in tables[entry.table]], FULL)
        assert ("times are too long" in " ".join("\n".join(texts(figure)).split())) is said


def test_published_figures_are_marks_where_they_compare_and_a_sentence_where_not(tables: Tables) -> None:
    assert PublishedFile.load().source
    for name, entry in CATALOGUE.items():
        found = published(name)
        if found is None:
            continue
        with style.drawing():
            said = " ".join("\n".join(texts(entry.draw(tables[entry.table], FULL))).split())
        if found.comparable:
            assert "Stars: published by the original." in said
        else:
            assert stars(name) == {}
            assert "Not drawn" in said
            assert all(f"{value:,g}" in said for value in found.values.values())


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"round_id": 1', r"rounds\.jsonl, line 1: .*invalid json"),
        ("[]", r"line 1: .*input should be (an object|a dictionary)"),
        ("{}", r"line 1: round_id: field required"),
        ("", r"rounds\.jsonl: expected 2 lines, got 0"),
    ],
)
def test_a_file_of_a_run_that_is_wrong_is_named(
    text: str, complaint: str, finished: list[tuple[str, StoredRun]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rounds.jsonl").write_text(f"{text}\n{text}" if text else "", encoding="utf-8")
    with pytest.raises(BadData, match=complaint):
        collect([("codecs", replace(finished[0][1], path=tmp_path))])


@pytest.mark.parametrize(
    ("key", "value"), [("bytes_up", -1), ("seconds", None), ("accuracy", "good"), ("train_s", 1e400)]
)
def test_a_number_that_cannot_be_is_named(
    key: str, value: Any, finished: list[tuple[str, StoredRun]], tmp_path: Path
) -> None:
    (tmp_path / "run").mkdir()
    lines = (finished[0][1].path / "run" / "rounds.jsonl").read_text().splitlines()
    lines[1] = json.dumps(json.loads(lines[1]) | {key: value})
    (tmp_path / "run" / "rounds.jsonl").write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(BadData, match=rf"rounds\.jsonl, line 2: {key}: .*, got"):
        collect([("codecs", replace(finished[0][1], path=tmp_path))])


def test_a_run_without_its_files_is_named(finished: list[tuple[str, StoredRun]], tmp_path: Path) -> None:
    for (group, done), name in zip(dict(finished).items(), FILES, strict=True):
        with pytest.raises(BadData, match=name):
            collect([(group, replace(done, path=tmp_path))])


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda text: text.replace("wait_s_max", "longest"), "expected the columns .*wait_s_max.*, got .*longest"),
        (lambda text: text + "dense,False\n", r"ranks\.csv, line \d+: seed: .*, got None"),
        (lambda text: text.replace("dgc,False,0,0", "dgc,False,zero,0"), r"ranks\.csv, line 2: seed: .*'zero'"),
    ],
)
def test_a_table_that_is_wrong_is_named(
    change: Any, complaint: str, finished: list[tuple[str, StoredRun]], tmp_path: Path
) -> None:
    path = tmp_path / "ranks.csv"
    write_table(path, TABLES["ranks"], collect(finished)["ranks"])
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(BadData, match=complaint):
        read_table(path, TABLES["ranks"])


@pytest.fixture(scope="module")
def program_here(
    tables: Tables, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], AbstractContextManager[Path]]:
    """Enters a folder in which all runs of the program are done."""
    here = tmp_path_factory.mktemp("program")
    store = Store(here / "runs/figures")
    for scale in (FULL, QUICK):
        for _, run in runs_of(make_plan(scale)):
            store.ensure(run, lambda folder: None)

    def all_done(finished: object) -> dict[str, list[TableRow]]:
        return {name: list(rows) for name, rows in tables.items()}

    @contextlib.contextmanager
    def enter() -> Iterator[Path]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(program, "collect", all_done)
            patch.chdir(here)
            yield here

    return enter


@pytest.fixture(scope="module")
def drawn(program_here: Callable[[], AbstractContextManager[Path]]) -> tuple[Path, str]:
    """The folder, where it has drawn all figures and copied those of the documents, and what it said."""
    said = io.StringIO()
    with program_here() as here, contextlib.redirect_stdout(said):
        (here / "docs" / "images").mkdir(parents=True)
        assert program.main(["--draw-only", "--install-docs"]) == 0
    return here, said.getvalue()


def test_the_program_draws_all_figures_and_an_index_that_names_data_and_command(drawn: tuple[Path, str]) -> None:
    here, said = drawn
    out = here / "build" / "figures"
    page = (out / "index.md").read_text(encoding="utf-8")
    for name, entry in CATALOGUE.items():
        assert {f"{name}.png", f"{name}.svg"} <= set(os.listdir(out))
        assert f"![{entry.title}]({name}.png)" in page
        assert f"[{entry.table}.csv](data/{entry.table}.csv)" in page
    assert page.count("command: `make figures`") == len(CATALOGUE)
    for group, run in runs_of(make_plan(FULL)):
        assert f"| {group} | [{run.label}](../../runs/figures/{run.label}-" in page
    assert "17 figures in" in said


def test_figures_of_a_quick_run_are_kept_apart_and_their_index_says_so(
    program_here: Callable[[], AbstractContextManager[Path]],
) -> None:
    with program_here() as here:
        assert program.main(["--quick", "--draw-only", "--only", "ladder"]) == 0
    page = (here / "build" / "figures-quick" / "index.md").read_text(encoding="utf-8")
    assert page.count('command: `make figures QUICK=1 ARGS="--only ladder"`') == len(entries_of(["ladder"]))
    for group, run in runs_of(make_plan(QUICK)):
        assert (f"| {group} | [{run.label}](../../runs/figures/{run.label}-" in page) == (group == "ladder")


def test_figures_of_other_data_are_kept_apart_and_their_index_says_so(
    program_here: Callable[[], AbstractContextManager[Path]], capsys: pytest.CaptureFixture[str]
) -> None:
    with program_here() as here:
        assert program.main(["--data", "glyphs", "--draw-only", "--only", "ladder"]) == 0
        page = (here / "build" / "figures-glyphs" / "index.md").read_text(encoding="utf-8")
        assert 'command: `make figures ARGS="--data glyphs --only ladder"`' in page
        assert program.main(["--data", "glyphs", "--draw-only", "--install-docs"]) == 2
    assert "--data glyphs, whose figures are for a look only" in capsys.readouterr().err


def test_copies_for_the_documents_are_small_and_never_quick(
    drawn: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    here, _ = drawn
    assert program.main(["--quick", "--draw-only", "--install-docs"]) == 2
    assert "not with --quick" in capsys.readouterr().err
    images = here / "docs" / "images"
    names = {f"{name.replace('_', '-')}.png" for name, entry in CATALOGUE.items() if entry.in_docs}
    assert set(os.listdir(images)) == names
    for name in names:
        assert (images / name).stat().st_size <= 120_000
        with Image.open(images / name) as picture:
            assert picture.width == 1080
    monkeypatch.setattr(index, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match="at most 1,000"):
        install(here / "build" / "figures", images)


def test_without_runs_it_says_which_figures_lack_what(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert program.main(["--draw-only"]) == 1
    said = capsys.readouterr().err
    assert all((f"not drawn: {name}: no rows of" in said) == bool(entry.groups) for name, entry in CATALOGUE.items())
    assert "Not drawn: no rows of" in (tmp_path / "build" / "figures" / "index.md").read_text(encoding="utf-8")


def test_without_mnist_it_says_so_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gradbus import models

    def missing(root: object) -> None:
        raise models.DataMissing("MNIST is not there", tmp_path)

    monkeypatch.setattr(models, "mnist", missing)
    monkeypatch.chdir(tmp_path)
    assert program.main([]) == 3
    assert "MNIST is not there" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_the_page_shows_every_figure_from_the_repository(root: Path) -> None:
    page = (root / "docs" / "figures.md").read_text(encoding="utf-8")
    for name, entry in CATALOGUE.items():
        picture = f"images/{name.replace('_', '-')}.png"
        assert (f"({picture})" in page) == entry.in_docs
        if entry.in_docs:
            assert (root / "docs" / picture).stat().st_size <= 120_000
