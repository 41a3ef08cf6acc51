"""What-if simulation, replay and calibration: the very scheduler, driven in virtual time.

Uses the scheduler and the simulated engine; nothing outside this package knows of it but the
command line.
"""
