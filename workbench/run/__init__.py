"""Who does what when: references, lanes, floors, and the scheduler that runs them on this machine."""
