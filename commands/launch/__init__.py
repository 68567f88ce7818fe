"""``gradbus run``: all ranks of a data-parallel job, as processes of this machine."""
