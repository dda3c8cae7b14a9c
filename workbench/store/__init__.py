"""What happened: the saved session file, the columns in memory, the hub that writes both."""
