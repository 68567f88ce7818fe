"""Keys of nodes: the allow list, admission, key epochs."""
