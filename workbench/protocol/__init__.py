"""The door between the user's process and an engine's: events and how they travel."""
