"""One renderer a show command: a device, and what the command names, become IOS's text without a final line break."""
