"""How configurations are declared and loaded, and the sections that a training reads."""
