"""A site of a tree, which is a Controller and a participant at once."""
