"""A trainer's meshes: degrees, descriptions, building them, and asking for them by axis names."""
