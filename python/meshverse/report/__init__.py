"""What happened to the process groups, and what sharing them saved, as text and as data."""
