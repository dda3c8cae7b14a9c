"""The router lab: simulated Cisco-style devices, the same for everyone who gives the same seed."""
