"""What to hand on: the comparison as one object, and its printed forms."""
