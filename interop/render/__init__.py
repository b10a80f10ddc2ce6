"""What another trainer is started with: its command line, environment and files."""
