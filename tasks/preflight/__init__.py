"""What files and a second can tell of a recipe before any stage: all findings at once, with the keys to change."""
