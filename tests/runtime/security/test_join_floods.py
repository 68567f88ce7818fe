"""An outsider floods the topics of joining, over DDS and from a process of its own: who is on the list gets in."""

from __future__ import annotations

from pathlib import Path

import pytest
from dds_domains import new_domain
from join_under_flood import join_while_flooded
from warm import fork


@pytest.mark.faults
def test_a_flood_of_hellos_in_its_name_and_of_answers_does_not_keep_a_node_of_the_list_out(tmp_path: Path) -> None:
    # In a process of its own: while it is flooded, Cyclone may take more than 10 s to delete a reader, and a bus that
    # is closed leaves that to a thread. The domain would still be open in the next test here.
    process = fork(join_while_flooded, str(tmp_path), new_domain())
    try:
        process.join(100)
        assert process.exitcode == 0, "it shows its error with the output of the processes"
    finally:
        process.kill()
