"""The Client: training, and what it sends and keeps."""
