"""Configuration: how sections are declared and loaded, and the sections that training reads."""
