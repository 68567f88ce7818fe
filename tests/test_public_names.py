"""What users were told to import can be imported; docs/public_names.txt holds all of it."""

import public_names
import pytest

NAMES = public_names.listed()


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
        "A rule inherits `ClientRule` in [base.py](../actors/federated/rules/base.py)."
    )
    assert public_names.names_in_page(page) == {
        "gradbus:FederatedConfig", "gradbus.torch", "gradbus.models", "gradbus.models:Task", "gradbus.torch:poll",
        "gradbus.actors.federated.rules.base:ClientRule",
    }  # fmt: skip
