"""Print the software bill of materials of this image: a CycloneDX document of its Python and Debian packages.

python3 sbom.py NAME PYTHON_ENVIRONMENT
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote


def python_packages(environment: Path) -> Iterator[dict[str, str]]:
    """Yield the packages of a virtual environment, by name."""
    folders = [str(folder) for folder in environment.glob("lib/python3*/site-packages")]
    for found in sorted(distributions(path=folders), key=lambda one: one.name.lower()):
        name, version = found.name.lower().replace("_", "-"), found.version
        yield component(name, version, f"pkg:pypi/{quote(name)}@{quote(version)}")


def debian_packages() -> Iterator[dict[str, str]]:
    """Yield the packages of the distribution, by name."""
    query = ["dpkg-query", "-W", "-f", "${db:Status-Abbrev}\t${Package}\t${Version}\t${Architecture}\n"]
    for line in subprocess.run(query, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines():
        status, name, version, architecture = line.split("\t")
        if status.startswith("ii"):
            yield component(name, version, f"pkg:deb/debian/{quote(name)}@{quote(version)}?arch={architecture}")


def component(name: str, version: str, purl: str) -> dict[str, str]:
    """Return a package as CycloneDX has it."""
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main(image: str, environment: str) -> None:
    """Print the document."""
    packages = [*python_packages(Path(environment)), *debian_packages()]
    subject = {"type": "container", "bom-ref": image, "name": image}
    head = {"bomFormat": "CycloneDX", "specVersion": "1.5", "version": 1, "metadata": {"component": subject}}
    sys.stdout.write(json.dumps({**head, "components": packages}, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
