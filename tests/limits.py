"""Time limits that several tests share."""

START_S = 120
"""Seconds that a test allows for starting processes and for what it waits for in them.

A limit of 30 s failed on a busy machine. A hang is still a failure, only a later one.
"""
