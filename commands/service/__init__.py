"""``gradbus service``: units of systemd for controllers, clients, hosts and relays."""
