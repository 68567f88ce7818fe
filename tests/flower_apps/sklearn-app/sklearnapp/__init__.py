"""A Flower app with scikit-learn, by messages."""
