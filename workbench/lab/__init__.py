"""Questions about the router lab whose right calls and answers are known: to train on, and to test with.

Imports `session` only. `workbench.worker.lab` trains on what is made here.
"""
