"""What ``gradbus COMMAND`` runs, and what wires the packages below together for it."""
