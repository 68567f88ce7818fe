"""Growth: the exponent that is found is the one that the numbers have, and what has too few points is not fitted."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

from gradbus.experiments.bench import __main__ as bench
from gradbus.experiments.bench import document
from gradbus.experiments.bench.__main__ import TITLES
from gradbus.experiments.bench.growth import draw, fit, lines, text_of
from gradbus.experiments.bench.results import Measurement, Results, machine, make_run, measurement


def grown(*points: Measurement, part: str = "clients") -> Results:
    run = make_run(part, points, facts=machine(), seconds=1.0, configuration={"effort": "tiny"})
    return Results(runs=(run,))


def points(exponent: float, at: tuple[float, ...] = (2, 8, 32), series: str = "time") -> list[Measurement]:
    samples = {n: [0.9 * n**exponent, n**exponent, 1.2 * n**exponent] for n in at}
    return [measurement(f"{series}, {n:g}", "ms", values, series=series, at=n) for n, values in samples.items()]


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0, -1.0])
def test_an_exact_power_law_is_found_without_an_error(exponent: float) -> None:
    found = fit((1, 3, 10, 50), [7 * n**exponent for n in (1, 3, 10, 50)])
    assert found == pytest.approx((exponent, 0.0, 7.0), abs=1e-6)


def test_the_standard_error_is_as_large_as_the_exponent_is_off() -> None:
    numbers, at, inside = random.Random(1), (2, 5, 10, 20, 50, 100, 200), 0
    for _ in range(500):
        found = fit(at, [n**1.5 * math.exp(numbers.gauss(0, 0.2)) for n in at])
        inside += abs(found.exponent - 1.5) <= 2 * found.error
    assert 0.82 <= inside / 500 <= 0.95  # two standard errors with 5 degrees of freedom: 90 %


def test_two_points_give_an_exponent_and_no_error() -> None:
    assert math.isnan(fit((1, 10), (1, 100)).error)
    assert text_of(fit((1, 10), (1, 100))) == "2.00"
    assert text_of(fit((1, 10, 100), (1, 10, 100))) == "1.00 ± 0.00"


@pytest.mark.parametrize(
    ("at", "costs"), [((1,), (1.0,)), ((2, 2), (1.0, 2.0)), ((1, 2), (0.0, 1.0)), ((1, 2), (1.0,))]
)
def test_what_cannot_be_fitted_is_refused(at: tuple[float, ...], costs: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="two different places"):
        fit(at, costs)


def test_lines_are_made_of_points_in_order_and_a_single_point_makes_none() -> None:
    two = points(1.0)
    results = grown(two[2], two[0], two[1], *points(0.0, (2,), "memory"), measurement("plain", "ms", [1.0]))
    (line,) = lines(results.runs[0])
    assert (line.name, line.at, line.costs) == ("time", (2, 8, 32), (2, 8, 32))
    assert line.summaries[0] == pytest.approx((1.9, 2.0, 2.2))


def test_a_fixed_cost_hides_growth_that_the_last_points_show() -> None:
    at = (1, 10, 100, 1000, 10_000)
    results = grown(*(measurement(f"{n}", "ms", [100.0 + n], series="time", at=n) for n in at))
    (line,) = lines(results.runs[0])
    assert line.whole.exponent < 0.6 < line.end.exponent


def test_growth_becomes_a_table_with_exponents_and_a_picture(tmp_path: Path) -> None:
    results = grown(*points(1.0), *points(0.0, series="memory"))
    page = document.tables(results, TITLES)
    assert "| cost | 2 | 8 | 32 | exponent | of the last three |" in page
    assert "| time, ms | 2.00 | 8.00 | 32.0 | 1.00 ± 0.00 | 1.00 ± 0.00 |" in page
    pytest.importorskip("matplotlib")
    assert draw(tmp_path / "new" / "growth.png", results)
    assert (tmp_path / "new" / "growth.png").read_bytes().startswith(b"\x89PNG")
    assert not draw(tmp_path / "none.png", Results())


@pytest.mark.slow
def test_clients_and_ranks_are_measured_as_they_grow(tmp_path: Path) -> None:
    assert bench.main(["--scale", "--tiny", "--part", "clients", "--part", "ranks", "--out", "growth.json"]) == 0
    results = Results.load(tmp_path / "growth.json")
    for part, at, at_least in (("clients", (2, 4), 5), ("ranks", (2, 3), 4)):
        run = results.run(part)
        assert run is not None
        found = lines(run)
        assert len(found) >= at_least
        assert {line.at for line in found} == {at}
        assert TITLES[part] in document.tables(results, TITLES)
