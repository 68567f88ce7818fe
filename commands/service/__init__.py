"""``gradbus service``: units of systemd for controllers, clients and relays."""
