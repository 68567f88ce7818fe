"""Bytes that nobody sent on purpose, for every parser: ``make fuzz``. docs/fuzzing.md says what and how."""
