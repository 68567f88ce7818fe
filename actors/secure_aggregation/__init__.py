"""Secure aggregation: the Controller learns the sum of the clients' updates, and no single one."""
