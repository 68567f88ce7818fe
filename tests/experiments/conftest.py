"""Examples and benchmarks run as commands do, with nothing set in the environment."""

from command_fixtures import begin_at_once, configs, plain_environment

__all__ = ["begin_at_once", "configs", "plain_environment"]
