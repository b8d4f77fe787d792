"""How one process group comes to be, is found again, and ends."""
