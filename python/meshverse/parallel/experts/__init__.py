"""Models with experts: their weights split by features or handed out whole, and their tokens."""
