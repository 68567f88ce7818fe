"""What ``gradbus relay`` says of its certificates before it serves."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from tls_scene import HOST, TlsFiles

import gradbus
from gradbus.commands.relay.command import warn_of_ends
from gradbus.runtime.network.links import LinkConfig


def warnings_about(links: LinkConfig) -> list[dict[str, Any]]:
    stream = io.StringIO()
    gradbus.log_to(stream, style="json")
    try:
        warn_of_ends(links)
    finally:
        gradbus.log_to(None)
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_authority_that_has_ended_is_named_and_one_of_a_bundle_is_not(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path)
    ended = files.server(HOST, days=-3)["certificate"]
    bundle = tmp_path / "bundle.pem"
    bundle.write_bytes(ended.read_bytes() + files.ca.read_bytes())
    listen = {"listen": (f"tls/{HOST}:7447",), **files.server()}
    (line,) = warnings_about(LinkConfig(**listen, ca=ended, requires_client_certificate=True))
    assert (line["event"], line["setting"], line["file"]) == ("certificate has ended", "relay.tls_ca", str(ended))
    assert line["days"] < 0
    assert warnings_about(LinkConfig(**listen, ca=bundle, requires_client_certificate=True)) == []
