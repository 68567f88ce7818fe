"""Where the time of a step goes, and the files that tell it."""
