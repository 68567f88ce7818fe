"""Memory that processes of one machine share: segments, frozen payloads, slots, the mailbox."""
