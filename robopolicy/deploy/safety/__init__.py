"""Safety layer between a policy and a robot, of pure functions and small state machines.

`SafetyFilter` limits every command, `Watchdog` checks the age of messages, `ObservationGate` detects observations out
of distribution, `EStop` is a latching emergency stop, `safe_stop` brakes, and `InterventionLog` records interventions.
"""
