"""Rehearsals: the settings of a rehearsed run, what its workers record, how runs are started, and how two are compared.

The command itself is `cli/rehearse.py`. Nothing here imports a framework.
"""
