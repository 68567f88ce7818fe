"""What users were told to import can be imported; docs/public_names.txt holds all of it."""

import subprocess
import sys

import public_names
import pytest

NAMES = public_names.listed()
PLACES = {
    "gradbus.rules:ClientRule": "gradbus.actors.federated.client.rules.base:ClientRule",
    "gradbus.selectors:Selector": "gradbus.actors.federated.controller.selectors.base:Selector",
    "gradbus.metrics:Scalars": "gradbus.commands.report.scalars:Scalars",
    "gradbus.metrics:TensorBoard": "gradbus.commands.report.trackers:TensorBoard",
}


@pytest.mark.parametrize("module", sorted({name.partition(":")[0] for name in NAMES}))
def test_every_listed_name_of_a_module_is_there(module):
    for name in (name for name in NAMES if name.partition(":")[0] == module):
        try:
            public_names.resolve(name)
        except ImportError as error:
            if (extra := public_names.missing_extra(error)) is None:
                raise
            pytest.skip(f"needs {extra}")


def test_the_list_is_what_pages_examples_and_exports_name():
    made = public_names.public_names()
    missing, gone = sorted(set(made) - set(NAMES)), sorted(set(NAMES) - set(made))
    assert made == NAMES, f"run make docs; not listed: {missing}, named nowhere any more: {gone}"


def test_a_name_is_found_in_prose_in_imports_in_attributes_and_as_a_base():
    page = (
        "Use `gradbus.FederatedConfig`, not `gradbus.toml` or ~/gradbus.runtime.\n\n"
        "```python\nimport gradbus.torch as hvd\nfrom gradbus.models import Task as Mine\n...\nhvd.poll(x)\n```\n\n"
        "A rule inherits `ClientRule` in [base.py](../actors/federated/client/rules/base.py)."
    )
    assert public_names.names_in_page(page) == {
        "gradbus:FederatedConfig",
        "gradbus.torch",
        "gradbus.models",
        "gradbus.models:Task",
        "gradbus.torch:poll",
        "gradbus.actors.federated.client.rules.base:ClientRule",
    }


@pytest.mark.parametrize("name", PLACES)
def test_what_users_inherit_is_the_class_that_gradbus_itself_uses(name):
    assert public_names.resolve(name) is public_names.resolve(PLACES[name])


def test_metrics_are_loaded_when_they_are_used():
    code = (
        "import sys, gradbus.metrics as m; before = set(sys.modules); m.Scalars, m.TensorBoard; "
        "print({'torch', 'prometheus_client'} & before, 'gradbus.commands.report.trackers' in sys.modules, "
        "hasattr(m, 'nothing'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "set() True False\n", done.stderr
