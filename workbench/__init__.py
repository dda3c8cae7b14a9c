"""Workbench: is the model you run still the model that was published?"""

__version__ = "0.1.0"
