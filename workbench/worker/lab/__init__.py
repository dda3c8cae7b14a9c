"""Training the lab's adapter and merging it, in a process of their own: `python -m workbench.worker.lab PLAN.json`."""
