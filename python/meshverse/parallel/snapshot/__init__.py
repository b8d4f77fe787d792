"""State of each step, kept in the memory of its hosts and loaded onto the ranks that come back."""
