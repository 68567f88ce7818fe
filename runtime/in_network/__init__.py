"""In-network aggregation: a node of the network adds what workers send, so that each sends its gradient once.

The protocol alone, without I/O: what a worker and an aggregator do with a packet or at a time, as lists of packets.
"""
