"""Editable installs have ``gradbus.experiments`` as well, which no wheel has: it is part of a checkout. A wheel has
what the checkout has now, and nothing that an earlier build has left.

All else about the package is in pyproject.toml.
"""

import shutil

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel


class FreshBuild(build_py):
    """Collects the packages for a wheel."""

    def run(self) -> None:
        """Remove what an earlier build has left: modules that have moved since would come along."""
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CheckoutInstall(editable_wheel):
    """Installs links to this checkout."""

    def run(self) -> None:
        """Add the package whose folder pyproject.toml maps for it."""
        self.distribution.packages.append("gradbus.experiments")
        super().run()


setup(cmdclass={"build_py": FreshBuild, "editable_wheel": CheckoutInstall})
