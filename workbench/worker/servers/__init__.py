"""Running servers spoken to over HTTP: one dialect a file beside `base`, the standard library and numpy only."""
