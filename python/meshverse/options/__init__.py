"""What one process group shall be: its backend, its options, its timeout, its isolation tag."""
