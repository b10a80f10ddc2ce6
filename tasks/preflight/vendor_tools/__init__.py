"""What the vendors' own tools say of devices: a parser of each tool's text, and the call that gets it."""
