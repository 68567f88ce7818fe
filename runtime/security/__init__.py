"""Sealed frames: what leaves a process is encrypted, and what comes in is checked before anything is done with it.

DDS has no security in the wheel that this project uses, so payloads are protected here, between the bus and DDS. What
that protects, and what it does not, is in docs/security.md; every byte is in docs/wire.md.

- :mod:`.settings`: the levels, and which of them may leave the machine
- :mod:`.standing`: what the level says to the actors

With one key for all:

- :mod:`.job_key`: the key that all members of a job share
- :mod:`.envelope`: the bytes around a sample
- :mod:`.stream_key`: the cipher, with the key of one stream
- :mod:`.incoming`, :mod:`.replay`: a stream on its way in, of which every envelope is opened once
- :mod:`.peers`: other processes, and whether they are alive or a recording
- :mod:`.seal`: seals and opens
- :mod:`.endpoints`: DDS writers and readers that do so
- :mod:`.greeter`: how processes prove to each other that they are alive

Joining, where each node has a key of its own:

- :mod:`.identity_key`: the key of a node
- :mod:`.allow_list`, :mod:`.list_file`: who may take part, and the file that says so
- :mod:`.join_messages`, :mod:`.handshake`: what is said, and the keys that come of it
- :mod:`.door`, with :mod:`.waiting`, :mod:`.joined`, :mod:`.rotation`, :mod:`.rival_controllers`, :mod:`.events`: the
  controller's side
- :mod:`.applicant`, with :mod:`.beacons`, :mod:`.membership_keys`: a node's side
- :mod:`.epoch`, :mod:`.shared_keys`: keys that the controller hands out, and what is sealed with them
- :mod:`.budget`: how much work strangers may cause
- :mod:`.porter`: all that over DDS
- :mod:`.identity_opening`: from settings to a participant

And after it:

- :mod:`.identity_node`, :mod:`.identity_endpoints`: of a federated run
- :mod:`.said`, :mod:`.model_signature`: what the controller signs there
- :mod:`.rank_node`, :mod:`.rank_keys`: of a job of ranks
"""

from gradbus.runtime.security.settings import Level, Security

__all__ = ["Level", "Security"]
