"""What stands between a policy and an actuator: pure functions and small state machines, always on.

`SafetyFilter` bounds every command, `Watchdog` judges the age of what is received, `ObservationGate` whether it looks
like the data, `EStop` latches, `safe_stop` brakes, and `InterventionLog` counts and records whatever any of them did.
"""
