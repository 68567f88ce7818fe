"""The bus: topics to publish on and to subscribe to, its receive and write threads."""
