"""Sealed frames: what leaves a process is encrypted, and what comes in is checked before anything is done with it.

DDS has no security in the wheel that this project uses, so payloads are protected here, between the bus and DDS. What
that protects, and what it does not, is in docs/security.md; every byte is in docs/wire.md.

- :mod:`.settings`: the levels, and which of them may leave the machine
- :mod:`.job_key`: the key that all members of a job share
- :mod:`.envelope`: the bytes around a sample
- :mod:`.replay`: every envelope is opened once
- :mod:`.peers`: other processes, and whether they are alive or a recording
- :mod:`.seal`: seals and opens
- :mod:`.endpoints`: DDS writers and readers that do so
- :mod:`.greeter`: how processes prove to each other that they are alive
"""

from gradbus.runtime.security.settings import Level, Security

__all__ = ["Level", "Security"]
