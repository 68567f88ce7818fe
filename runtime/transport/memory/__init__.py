"""The transport in memory: all participants are in one process, and a seed decides what happens between them.

    network = MemoryNetwork(seed=7)
    network.loss, network.jitter_s = 0.1, 0.002
    async with connect_over(partial(MemoryTransport, network, MemoryNode("robot-1")), "mnist") as bus: ...
    network.close()

It obeys the contract of :mod:`gradbus.runtime.transport.api` with the faults of a real network below it: loss, delay,
partitions, processes that die, and readers that take nothing. Tests run it with threads and in real time, simulations
in virtual time, where each run of a seed is the same.
"""
