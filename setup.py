"""Editable installs have ``gradbus.experiments`` as well, which no wheel has: it is part of a checkout.

All else about the package is in pyproject.toml.
"""

from setuptools import setup
from setuptools.command.editable_wheel import editable_wheel


class CheckoutInstall(editable_wheel):
    """Installs links to this checkout."""

    def run(self) -> None:
        """Add the package whose folder pyproject.toml maps for it."""
        self.distribution.packages.append("gradbus.experiments")
        super().run()


setup(cmdclass={"editable_wheel": CheckoutInstall})
