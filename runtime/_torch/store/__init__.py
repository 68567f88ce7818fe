"""The store at addresses dds://domain/job: rendezvous of process groups without a TCP server."""
