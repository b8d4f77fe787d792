"""What every strategy reads of a model or changes in it."""
