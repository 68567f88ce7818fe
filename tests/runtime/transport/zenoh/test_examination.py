"""What the doctor finds at the endpoints of links, and in certificates."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from ports import free_port
from tls_scene import HOST, TlsFiles, router

from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.transport.examination import LinkReport
from gradbus.runtime.transport.zenoh.examination import examine_links


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return TlsFiles(tmp_path_factory.mktemp("tls"))


def named(reports: Sequence[LinkReport], name: str) -> LinkReport:
    (found,) = [report for report in reports if report.name == name]
    return found


def test_each_endpoint_is_tried_by_itself(files: TlsFiles) -> None:
    links = LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), **files.server())
    closed = f"tls/{HOST}:{free_port()}"
    with router(links):
        reports = examine_links(LinkConfig(connect=(closed, *links.listen), ca=files.ca))
    well, fault = named(reports, f"bus.connect {links.listen[0]}"), named(reports, f"bus.connect {closed}")
    assert well.value.startswith("Zenoh answers, ")
    assert well.value.endswith(" ms, TLS")
    assert (well.cure, well.is_fault) == ("", False)
    assert fault.is_fault
    assert "connection refused" in fault.value
    assert "Start what listens there" in fault.cure


def test_an_endpoint_to_listen_on_is_free_or_taken(files: TlsFiles) -> None:
    links = LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), **files.server())
    name = f"bus.listen {links.listen[0]}"
    assert named(examine_links(links), name) == LinkReport(name=name, value="free, TLS")
    with router(links):
        taken = named(examine_links(links), name)
    assert taken.value == "cannot be listened on now"
    assert taken.cure.startswith("port ")
    assert not taken.is_fault  # the job may be running


@pytest.mark.parametrize(("days", "warns"), [(31.5, False), (29.5, True), (1.5, True)])
def test_a_certificate_that_ends_within_30_days_is_a_warning(files: TlsFiles, days: float, warns: bool) -> None:
    links = LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), ca=files.ca, **files.server(HOST, days=days))
    reports = examine_links(links)
    certificate, authority = named(reports, "bus.tls_certificate"), named(reports, "bus.tls_ca")
    assert certificate.value.startswith(f"{links.certificate}, valid until 20")
    assert not certificate.is_fault
    assert bool(certificate.cure) is warns
    if warns:
        shown = f"it ends in {int(days)} day{'s' * (int(days) != 1)}: make a new one with the same authority"
        assert certificate.cure.startswith(shown)
    assert authority.cure == ""


def test_a_certificate_that_has_ended_is_a_fault_and_nothing_is_dialled_with_it(files: TlsFiles) -> None:
    links = LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), **files.server(HOST, days=-2))
    reports = examine_links(links)
    assert reports[-1].is_fault
    assert "the certificate ended on" in reports[-1].cure
    assert not any(report.name.startswith("bus.listen") for report in reports)


def test_a_file_that_is_missing_is_a_fault_with_the_name_of_its_setting(files: TlsFiles) -> None:
    links = LinkConfig(connect=(f"tls/{HOST}:{free_port()}",), ca=files.folder / "none.pem")
    (report,) = examine_links(links)
    assert (report.name, report.is_fault) == ("bus.tls_ca", True)
    assert "none.pem cannot be read: No such file" in report.cure
