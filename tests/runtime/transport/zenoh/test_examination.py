"""What the doctor finds at the endpoints of links, and in certificates."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from ports import free_port
from tls_scene import HOST, TlsFiles, router, server, silent

from gradbus.runtime.network.certificates import is_authority, names_of, serves
from gradbus.runtime.network.links import LinkConfig
from gradbus.runtime.security.tls_authority import Issued, new_authority
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
        assert f"move the two old files away, run 'gradbus keys tls {HOST} --out DIR'" in certificate.cure
        assert "restart what listens here" in certificate.cure
    assert authority.cure == ""


def test_a_client_whose_certificate_ends_is_told_to_have_one_made_for_the_same_name(files: TlsFiles) -> None:
    own = files.write(files.authority.client("site-1", days=9.5), "ending")
    reports = examine_links(LinkConfig(connect=(f"tls/{HOST}:{free_port()}",), ca=files.ca, **own))
    cure = named(reports, "bus.tls_certificate").cure
    assert cure.startswith("it ends in 9 days: ")
    assert "run 'gradbus keys tls --client site-1 --out DIR'" in cure


def test_a_certificate_that_ends_at_the_other_end_is_a_warning_for_those_that_dial(files: TlsFiles) -> None:
    ending, lasting = (
        LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), **files.server(HOST, days=days)) for days in (20.5, 99)
    )
    with router(ending), router(lasting):
        reports = examine_links(LinkConfig(connect=(*ending.listen, *lasting.listen), ca=files.ca))
    warned, well = (named(reports, f"bus.connect {links.listen[0]}") for links in (ending, lasting))
    assert warned.value.startswith("Zenoh answers, ")
    assert not warned.is_fault
    assert warned.cure.startswith("the certificate there: it ends in 20 days. On that machine, make a new one")
    assert f"'gradbus keys tls {HOST} --out DIR'" in warned.cure
    assert well.cure == ""


def test_a_name_of_a_foreign_certificate_that_is_no_host_is_in_no_command(files: TlsFiles) -> None:
    issued = self_signed("a;reboot", days=5.5)
    links = LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), **files.write(issued, "odd"))
    cure = named(examine_links(links), "bus.tls_certificate").cure
    assert "'gradbus keys tls HOST --out DIR'" in cure
    assert "reboot" not in cure


def test_a_certificate_that_has_an_extension_twice_is_for_no_name_and_for_no_use() -> None:
    """As one may be that comes from the network, whose signature is not looked at."""
    twice = {"2.5.29.17": names_of, "2.5.29.19": is_authority, "2.5.29.37": serves}
    for oid, read in twice.items():
        der = self_signed("a", days=1.0).certificate.public_bytes(serialization.Encoding.DER)
        assert der.count(b"\x55\x1d\x63") == 1
        last = int(oid.rpartition(".")[2])
        spoilt = der.replace(b"\x55\x1d\x63", bytes([0x55, 0x1D, last])).replace(
            b"\x55\x1d\x62", bytes([0x55, 0x1D, last])
        )
        assert not read(x509.load_der_x509_certificate(spoilt)), oid


def self_signed(host: str, *, days: float) -> Issued:
    """A certificate of another program, which has any text for a host, and two extensions that are none."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.oid.NameOID.COMMON_NAME, host)])
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=days))
    builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
    for number in (98, 99):
        unknown = x509.UnrecognizedExtension(x509.ObjectIdentifier(f"2.5.29.{number}"), b"\x05\x00")
        builder = builder.add_extension(unknown, critical=False)
    return Issued(builder.sign(key, hashes.SHA256()), key)


def test_an_authority_that_has_ended_is_reported_with_its_date(files: TlsFiles) -> None:
    ended = authority_file(files, -2.0)
    report = named(examine_links(LinkConfig(connect=(f"tls/{HOST}:{free_port()}",), ca=ended)), "bus.tls_ca")
    assert re.match(r"it ended on \d{4}-\d\d-\d\d \d\d:\d\d UTC: an authority: make a new one", report.cure)


def test_the_first_of_several_authorities_to_end_asks_for_no_new_authority_of_gradbus(files: TlsFiles) -> None:
    bundle = files.folder / "bundle.pem"
    bundle.write_bytes(files.ca.read_bytes() + authority_file(files, 3.5).read_bytes())
    report = named(examine_links(LinkConfig(connect=(f"tls/{HOST}:{free_port()}",), ca=bundle)), "bus.tls_ca")
    assert report.cure.startswith("it ends in 3 days: it is the first of 2 in that file to end.")
    assert "gradbus keys tls" not in report.cure


def authority_file(files: TlsFiles, days: float) -> Path:
    """The file of another authority, which ends so soon."""
    path = files.folder / f"authority{days:g}.pem"
    made = new_authority("gradbus other", days=days)
    path.write_bytes(made.certificate.public_bytes(serialization.Encoding.PEM))
    return path


def test_a_certificate_of_a_client_is_refused_where_others_dial(files: TlsFiles) -> None:
    links = LinkConfig(listen=(f"tls/{HOST}:{free_port()}",), ca=files.ca, **files.client())
    report = examine_links(links)[-1]
    assert report.is_fault
    assert report.name == "bus.tls_certificate"
    assert "is a client's certificate (extendedKeyUsage without serverAuth)" in report.cure


def test_who_dials_an_end_with_the_certificate_of_a_client_is_told_that_it_is_one(files: TlsFiles) -> None:
    with server(silent, files.client("localhost")) as port:
        (_, report) = examine_links(LinkConfig(connect=(f"tls/localhost:{port}",), ca=files.ca))
    assert report.is_fault
    assert report.value == (
        "its certificate is a client's, and no machine's that is dialled (extendedKeyUsage without serverAuth)"
    )
    assert report.cure == "Make one there: 'gradbus keys tls localhost'"


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
